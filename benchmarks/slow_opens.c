/* A folder shown again, read-only, where opening a file takes MILLISECONDS:
   slow_opens FOLDER MILLISECONDS MOUNTPOINT [OPTIONS OF FUSE].
   All else takes what FUSE takes; names and attributes are kept for a minute, as by a client of NFS,
   and the content as long as time and size of a file stay. */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *folder;
static struct timespec delay;

#define BELOW(path) \
  char there[PATH_MAX]; \
  if (snprintf(there, sizeof there, "%s%s", folder, path) >= (int)sizeof there) return -ENAMETOOLONG

static void *started(struct fuse_conn_info *connection, struct fuse_config *config) {
  (void)connection;
  config->entry_timeout = config->attr_timeout = config->negative_timeout = 60;
  config->auto_cache = 1;
  return NULL;
}

static int attributes(const char *path, struct stat *found, struct fuse_file_info *file) {
  if (file) return fstat((int)file->fh, found) ? -errno : 0;
  BELOW(path);
  return lstat(there, found) ? -errno : 0;
}

static int link_of(const char *path, char *target, size_t size) {
  BELOW(path);
  ssize_t length = readlink(there, target, size - 1);
  if (length < 0) return -errno;
  target[length] = 0;
  return 0;
}

static int opened(const char *path, struct fuse_file_info *file) {
  BELOW(path);
  nanosleep(&delay, NULL);
  int number = open(there, O_RDONLY | O_CLOEXEC);
  if (number < 0) return -errno;
  file->fh = (uint64_t)number;
  return 0;
}

static int content(const char *path, char *bytes, size_t size, off_t from,
                   struct fuse_file_info *file) {
  (void)path;
  ssize_t length = pread((int)file->fh, bytes, size, from);
  return length < 0 ? -errno : (int)length;
}

static int closed(const char *path, struct fuse_file_info *file) {
  (void)path;
  return close((int)file->fh) ? -errno : 0;
}

static int listed(const char *path, void *list, fuse_fill_dir_t fill, off_t from,
                  struct fuse_file_info *file, enum fuse_readdir_flags flags) {
  (void)from, (void)file, (void)flags;
  BELOW(path);
  DIR *open_folder = opendir(there);
  if (!open_folder) return -errno;
  for (struct dirent *each; (each = readdir(open_folder));) fill(list, each->d_name, NULL, 0, 0);
  closedir(open_folder);
  return 0;
}

static const struct fuse_operations operations = {
    .init = started, .getattr = attributes, .readlink = link_of, .open = opened,
    .read = content, .release = closed, .readdir = listed,
};

int main(int count, char **words) {
  if (count < 4) return fprintf(stderr, "usage: see slow_opens.c\n"), 2;
  folder = words[1];
  long milliseconds = atol(words[2]);
  delay = (struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000};
  words[2] = words[0];
  return fuse_main(count - 2, words + 2, &operations, NULL);
}
