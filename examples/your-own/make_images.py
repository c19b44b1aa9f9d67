"""Write scikit-learn's handwritten digits as a folder of PNG images, to try the workflow on.

images/train/<class>/*.png    images/test/<class>/*.png
"""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

digits = load_digits()
root = Path(__file__).with_name("images")
for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
    split = "test" if number % 5 == 0 else "train"
    folder = root / split / NAMES[label]
    folder.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray((pixels * 255 / 16).astype("uint8"))
    image.resize((48, 64)).save(folder / f"{number:04}.png")
print(f"{len(digits.target):,} images in {root}")
