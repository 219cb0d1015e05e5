/* A file system that fails on demand: preloaded into the ranks of a test, it fails or delays calls on paths below
 * FAULTY_ROOT as the lines of the file FAULTY_RULES say, which is read anew at each of these calls:
 *
 *     RANK CALL ACTION AFTER PART
 *
 * RANK: number, or * for all. CALL: write, fsync, fsyncdir, rename, mkdir, create, open, read, unlink, list or all.
 * ACTION: a number of errno.h, or hold: wait until the rules are others, then do it. AFTER: only from this byte of the file
 * on, and a write up to there is a short one, as on a full file system; of fsyncdir: once so many files are there.
 * PART: of the path, or * for all. The first line that fits counts, but one that holds up does not.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_ours(const char *path)
{
    const char *root = getenv("FAULTY_ROOT");
    return root && path && strncmp(path, root, strlen(root)) == 0;
}

static const char *path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

static int fits(const char *wanted, const char *found)
{
    return strcmp(wanted, "*") == 0 || strcmp(wanted, found) == 0;
}

static void read_rules(char *text, size_t bytes)
{
    int fd = syscall(SYS_openat, AT_FDCWD, getenv("FAULTY_RULES"), O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : syscall(SYS_read, fd, text, bytes - 1);
    if (fd >= 0)
        syscall(SYS_close, fd);
    text[length < 0 ? 0 : length] = 0;
}

static void hold(const char *rules)
{
    char now[4096];
    do {
        struct timespec moment = {0, 10000000};
        nanosleep(&moment, NULL);
        read_rules(now, sizeof now);
    } while (strcmp(now, rules) == 0);
}

/* The error of a call, or 0; bytes, where not null, are how many of those from `at` on may be written. */
static int fault(const char *call, const char *path, off_t at, size_t *bytes)
{
    if (!is_ours(path))
        return 0;
    char rules[4096], text[4096], who[32], what[32], action[32], part[256];
    read_rules(rules, sizeof rules);
    strcpy(text, rules);
    const char *rank = getenv("PMI_RANK") ? getenv("PMI_RANK") : getenv("OMPI_COMM_WORLD_RANK");
    char *rest = text, *line;
    while ((line = strsep(&rest, "\n"))) {
        long after;
        if (sscanf(line, "%31s %31s %31s %ld %255s", who, what, action, &after, part) != 5)
            continue;
        int all = strcmp(what, "all") == 0;
        if (!fits(who, rank ? rank : "0") || !(all || strcmp(what, call) == 0))
            continue;
        if (strcmp(part, "*") != 0 && !strstr(path, part))
            continue;
        if (strcmp(action, "hold") == 0) {
            hold(rules);
            continue;
        }
        if (at < after) {
            if (bytes && *bytes > (size_t)(after - at))
                *bytes = after - at;
            continue;
        }
        return atoi(action);
    }
    return 0;
}

static int fail(int number)
{
    errno = number;
    return -1;
}

ssize_t write(int fd, const void *from, size_t bytes)
{
    char path[PATH_MAX];
    off_t at = is_ours(path_of(fd, path)) ? lseek(fd, 0, SEEK_CUR) : 0;
    int error = fault("write", path, at, &bytes);
    return error ? fail(error) : NEXT(write)(fd, from, bytes);
}

static off_t files_in(const char *path)
{
    off_t files = 0;
    DIR *open = NEXT(opendir)(path);
    for (struct dirent *one; open && (one = readdir(open));)
        files += one->d_name[0] != '.';
    if (open)
        closedir(open);
    return files;
}

int fsync(int fd)
{
    char path[PATH_MAX];
    struct stat status;
    int is_directory = fstat(fd, &status) == 0 && S_ISDIR(status.st_mode) && is_ours(path_of(fd, path));
    int error = fault(is_directory ? "fsyncdir" : "fsync", path_of(fd, path), is_directory ? files_in(path) : 0, NULL);
    return error ? fail(error) : NEXT(fsync)(fd);
}

int rename(const char *from, const char *to)
{
    int error = fault("rename", to, 0, NULL);
    return error ? fail(error) : NEXT(rename)(from, to);
}

int mkdir(const char *path, mode_t mode)
{
    int error = fault("mkdir", path, 0, NULL);
    return error ? fail(error) : NEXT(mkdir)(path, mode);
}

int unlink(const char *path)
{
    int error = fault("unlink", path, 0, NULL);
    return error ? fail(error) : NEXT(unlink)(path);
}

int rmdir(const char *path)
{
    int error = fault("unlink", path, 0, NULL);
    return error ? fail(error) : NEXT(rmdir)(path);
}

DIR *opendir(const char *path)
{
    int error = fault("list", path, 0, NULL);
    errno = error;
    return error ? NULL : NEXT(opendir)(path);
}

static int open_or_fail(const char *path, int flags, mode_t mode, int (*then)(const char *, int, ...))
{
    int error = fault(flags & O_CREAT ? "create" : "open", path, 0, NULL);
    return error ? fail(error) : then(path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest)
{
    return flags & O_CREAT ? va_arg(rest, mode_t) : 0;
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return open_or_fail(path, flags, mode, NEXT(open));
}

int open64(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = mode_of(flags, rest);
    va_end(rest);
    return open_or_fail(path, flags, mode, NEXT(open64));
}

ssize_t pread(int fd, void *into, size_t bytes, off_t at)
{
    char path[PATH_MAX];
    int error = fault("read", path_of(fd, path), at, &bytes);
    return error ? fail(error) : NEXT(pread)(fd, into, bytes, at);
}

ssize_t pread64(int fd, void *into, size_t bytes, off64_t at)
{
    char path[PATH_MAX];
    int error = fault("read", path_of(fd, path), at, &bytes);
    return error ? fail(error) : NEXT(pread64)(fd, into, bytes, at);
}
