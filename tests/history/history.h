/* Shared by the parts of `history`. A history is a list of operations, one a line: a depth, a name and arguments. The
   deeper lines below an operation are its block, which a child, a thread or a signal handler performs. The transcript
   depends on no address, process number or time. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../processor.h"

/* Newer than some C libraries. */
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

#define PAGE 4096L
#define MIB (1L << 20)
#define ARGUMENTS 8
#define SLOTS 12
#define FILES 8
/* The address of a slot's memory, if the history asks for a fixed one: far from the kernel's choices. */
#define ARENA(slot) ((char *)(0x100000000000L + (slot)*64 * MIB))

struct operation {
    int at, depth;
    const struct action *action;
    long argument[ARGUMENTS];
    int arguments;
};
struct action {
    const char *name;
    void (*run)(const struct operation *operation);
};
struct word {
    const char *name;
    long value;
};

/* A piece of memory. */
struct slot {
    char *at;
    long pages;
    /* True if children share the memory. */
    int is_shared;
};
extern struct slot slots[SLOTS];

/* A file, a pipe or a pair of sockets: one end is read, the other written. */
struct file {
    int reader, writer;
};
extern struct file files[FILES];

/* main.c */
extern char *program, *history;
void run_block(const struct operation *of);
int has_block(const struct operation *of);
/* Prints a line: the operation's place and name, an answer, its error if the answer is -1, and a sum. */
void say(const struct operation *operation, long answer, uint64_t sum);
void say_text(const struct operation *operation, const char *text);
_Noreturn void end(const char *text, int status);

/* memory.c */
extern const struct action memory_actions[];
void catch_faults(int flags);
uint64_t mix(uint64_t sum, uint64_t value);
uint64_t sum_of(const void *at, long bytes);
/* The sum of a slot's bytes. An unreadable page counts by its signal. */
uint64_t sum_of_slot(const struct slot *slot);
uint64_t sum_of_all(void);
/* Reads or writes eight bytes. Returns 0, or the signal and its code. */
long peek(const void *at, uint64_t *value);
long poke(void *at, uint64_t value);
/* Fills whole pages. Returns 0, or the signal and code of the first page that cannot be written. */
long fill(char *at, long pages, uint64_t seed);
struct slot *slot_of(const struct operation *operation, int argument);
/* True if the history alone maps memory beside a slot. Elsewhere a program cannot know its neighbours. */
int is_apart(const struct slot *slot);
/* A slot's memory from a byte on. Limits the length to the slot, unless the slot has no neighbours. */
char *bytes_of(const struct slot *slot, long at, long *bytes);
/* A slot's memory by three arguments: slot, first page, number of pages. NULL if the slot is empty. */
char *range_of(const struct operation *operation, int argument, long *pages);
void page_out(void *at, long bytes);
char *map(long bytes);

/* threads.c: true if a thread sends signals to this one, at any time. */
int is_stopped_at_times(void);

/* signals.c: sets the landing of this thread's jumping handlers. Returns the previous landing. */
sigjmp_buf *land_at(sigjmp_buf *landing);

/* processes.c, signals.c, threads.c, files.c, calls.c */
extern const struct action process_actions[], signal_actions[], thread_actions[], file_actions[], call_actions[];
void say_status(const struct operation *operation, int status);
int path_of(char *path, const char *kind, long number);
