/* Preloaded: calls on files of one folder, counted; from the `first`-th on `many` of them fail, hang or are slow. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t length;
static long calls, first = -1, many;
static int with_errno;
static unsigned wait_us;

void faults_arm(const char *directory, long from, long count, int number, unsigned microseconds) {
    strncpy(folder, directory, sizeof folder - 1);
    length = strlen(folder);
    first = from, many = count, with_errno = number, wait_us = microseconds, calls = 0;
}

long faults_calls(void) { return calls; }

static int is_fault(const char *path) {
    if (!length || strncmp(path, folder, length)) return 0;
    long mine = __sync_fetch_and_add(&calls, 1);
    if (first < 0 || mine < first || mine >= first + many) return 0;
    for (unsigned left = wait_us; left;) {
        unsigned now = left > 500000 ? 500000 : left;
        usleep(now);
        left -= now;
    }
    if (with_errno) errno = with_errno;
    return with_errno != 0;
}

static int is_fault_of(int descriptor) {
    char link[64], path[PATH_MAX];
    if (!length || descriptor < 3) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return is_fault(path);
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    return is_fault(path) ? -1 : real(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    REAL(open);
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    return is_fault(path) ? -1 : real(path, flags, mode);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(write);
    return is_fault_of(descriptor) ? -1 : real(descriptor, data, size);
}

int fsync(int descriptor) {
    REAL(fsync);
    return is_fault_of(descriptor) ? -1 : real(descriptor);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return is_fault(to) ? -1 : real(from, to);
}

int link(const char *from, const char *to) {
    REAL(link);
    return is_fault(to) ? -1 : real(from, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return is_fault(path) ? -1 : real(path, mode);
}

int unlink(const char *path) {
    REAL(unlink);
    return is_fault(path) ? -1 : real(path);
}
