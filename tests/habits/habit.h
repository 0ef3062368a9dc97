// Shared by the programs here. They grow until pages leave, send pages out, and print a line. The
// line must be the same when a program has all of its memory.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../processor.h"

enum { PAGE = 4096, MIB = 1 << 20 };

// Calls that are newer than some C libraries. All processors have the same numbers.
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

static inline unsigned char *map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) abort();
    return at;
}

// Without uzswap a page would go to the machine's swap, which the test of a killed device ends
// without its contents. MADV_COLD has the same answers, and the page stays.
static inline int advise(void *at, size_t bytes, int advice) {
    int stays = advice == MADV_PAGEOUT && !getenv("UZSWAP_TREE");
    return madvise(at, bytes, stays ? MADV_COLD : advice);
}
#define madvise advise

// True if a page is out. In another test's swap it does not count, where it comes before uzswap has
// taken the program over. The kernel has guards in its table as swapped pages, since 6.15 with bit 58.
static inline int is_out(void *at) {
    unsigned char is_there = 1;
    unsigned long entry = 0;
    if (mincore(at, PAGE, &is_there) || is_there & 1) return 0;
    int table = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (table < 0) return 1;
    (void)!pread(table, &entry, sizeof entry, (long)at / PAGE * (long)sizeof entry);
    close(table);
    return !(entry >> 62 & 1) || entry >> 58 & 1;
}

// Pages a range out. Returns true if its first page is out.
static inline int send_out(void *at, size_t bytes) {
    madvise(at, bytes, MADV_PAGEOUT);
    return is_out(at);
}

// Takes 60 MiB, in small steps. In 32 MiB, pages leave from then on.
static inline void grow(void) {
    static unsigned char *all[60];
    for (int i = 0; i < 60; i++) {
        all[i] = map(MIB);
        memset(all[i], i + 1, MIB);
        usleep(4000);
    }
    int is_watched = getenv("UZSWAP_TREE") != NULL;
    for (int i = 0; is_watched && i < 1000 && !send_out(all[0], PAGE); i++) {
        usleep(10000);
        *(volatile unsigned char *)all[0] = 1;
    }
}

static inline void end_after(unsigned seconds) {
    signal(SIGALRM, SIG_DFL);
    alarm(seconds);
}

typedef int Habit(void);
struct named { const char *name; Habit *habit; };

// Runs the habit with this name.
static inline int choose(const struct named *all, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(all[i].name, name)) {
            int status = all[i].habit();
            fflush(stdout);
            return status;
        }
    return 99;
}
