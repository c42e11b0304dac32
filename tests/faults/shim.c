/* Faults in system calls, for LD_PRELOAD. FAULT = "call:path substring:number:kind", calls counted per process.

   call    open, read, write, fsync, rename, or any
   number  the first matching call that fails; all later ones fail as well, except for kill
   kind    eio, enospc, kill, slow=MILLISECONDS
   FAULT_CLOCK = "seconds:delay" lets the wall clock jump once a process has run for that many seconds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_int calls;

static int fails(const char *call, const char *path) {
  const char *fault = getenv("FAULT");
  char wanted[16], part[256], kind[32];
  int number;
  if (!fault || sscanf(fault, "%15[^:]:%255[^:]:%d:%31s", wanted, part, &number, kind) != 4) return 0;
  if (strcmp(wanted, "any") && strcmp(wanted, call)) return 0;
  if (!strstr(path, part) || atomic_fetch_add(&calls, 1) + 1 < number) return 0;
  if (!strcmp(kind, "kill")) raise(SIGKILL);
  if (!strncmp(kind, "slow=", 5)) {
    struct timespec time = {atoi(kind + 5) / 1000, atoi(kind + 5) % 1000 * 1000000L};
    nanosleep(&time, NULL);
    return 0;
  }
  errno = strcmp(kind, "enospc") ? EIO : ENOSPC;
  return 1;
}

static int fails_on(const char *call, int file) {
  char link[64], path[4096];
  if (!getenv("FAULT")) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FILE(type, name, call, parameters, arguments) \
  type name parameters { return fails_on(call, file) ? -1 : REAL(name) arguments; }

ON_FILE(ssize_t, write, "write", (int file, const void *data, size_t size), (file, data, size))
ON_FILE(ssize_t, pwrite, "write", (int file, const void *data, size_t size, off_t at), (file, data, size, at))
ON_FILE(ssize_t, pwrite64, "write", (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
ON_FILE(ssize_t, read, "read", (int file, void *data, size_t size), (file, data, size))
ON_FILE(ssize_t, pread, "read", (int file, void *data, size_t size, off_t at), (file, data, size, at))
ON_FILE(ssize_t, pread64, "read", (int file, void *data, size_t size, off64_t at), (file, data, size, at))
ON_FILE(ssize_t, preadv, "read", (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
ON_FILE(ssize_t, preadv64, "read", (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at))
ON_FILE(int, fsync, "fsync", (int file), (file))
ON_FILE(int, fdatasync, "fsync", (int file), (file))

int rename(const char *from, const char *to) { return fails("rename", from) ? -1 : REAL(rename)(from, to); }

int renameat(int a, const char *from, int b, const char *to) {
  return fails("rename", from) ? -1 : REAL(renameat)(a, from, b, to);
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPEN(name, call_real, ...)                  \
  int name(__VA_ARGS__, ...) {                      \
    va_list rest;                                   \
    va_start(rest, flags);                          \
    mode_t mode = mode_of(flags, rest);             \
    va_end(rest);                                   \
    return fails("open", path) ? -1 : call_real;    \
  }

OPEN(open, REAL(open)(path, flags, mode), const char *path, int flags)
OPEN(open64, REAL(open64)(path, flags, mode), const char *path, int flags)
OPEN(openat, REAL(openat)(at, path, flags, mode), int at, const char *path, int flags)

int clock_gettime(clockid_t clock, struct timespec *time) {
  static atomic_long started;
  struct timespec now;
  long seconds, delay, none = 0;
  int result = REAL(clock_gettime)(clock, time);
  const char *jump = getenv("FAULT_CLOCK");
  if (!jump || sscanf(jump, "%ld:%ld", &seconds, &delay) != 2) return result;
  REAL(clock_gettime)(CLOCK_MONOTONIC, &now);
  atomic_compare_exchange_strong(&started, &none, now.tv_sec);
  if (clock == CLOCK_REALTIME && now.tv_sec - atomic_load(&started) >= delay) time->tv_sec += seconds;
  return result;
}
