// Processes read and write each other's memory, most of which is absent.
#include "habit.h"
#include <sys/uio.h>

enum { BYTES = 8 * MIB };

static unsigned char byte_at(size_t at) { return (unsigned char)((at * 2654435761u >> 13) + at / PAGE); }

// A child with its own content in memory that it has from its parent. If the child is managed, the
// memory is paged out.
struct child { pid_t number; int told, asked; unsigned char *memory; };

static void live(struct child *own, int is_watched, int grows) {
    char word;
    if (grows) grow();
    for (size_t at = 0; at < BYTES; at++) own->memory[at] = byte_at(at);
    for (int i = 0; is_watched && i < 3; i++) send_out(own->memory, BYTES);
    unsigned char there[BYTES / PAGE];
    mincore(own->memory, BYTES, there);
    size_t in = 0;
    for (size_t page = 0; page < BYTES / PAGE; page++) in += there[page] & 1;
    word = is_watched && in > BYTES / PAGE / 2 ? 'i' : 'o';
    if (write(own->told, &word, 1) != 1) _exit(1);
    // What the parent has written.
    while (read(own->asked, &word, 1) == 1) {
        size_t bad = 0;
        for (size_t at = 0; at < BYTES; at++) bad += own->memory[at] != (unsigned char)~byte_at(at);
        word = bad ? 'b' : 'g';
        if (write(own->told, &word, 1) != 1) _exit(1);
    }
    _exit(0);
}

static struct child begin(unsigned char *memory, int grows) {
    int told[2], asked[2];
    if (pipe(told) || pipe(asked)) abort();
    struct child child = {.memory = memory, .told = told[1], .asked = asked[0]};
    child.number = fork();
    if (child.number == 0) {
        close(asked[1]);
        close(told[0]);
        live(&child, getenv("UZSWAP_TREE") != NULL, grows);
    }
    close(told[1]);
    close(asked[0]);
    child.told = told[0];
    child.asked = asked[1];
    char word = '?';
    if (read(child.told, &word, 1) != 1) abort();
    if (word != 'o') printf("its memory is in\n");
    return child;
}

static void end(struct child *child) {
    close(child->asked);
    close(child->told);
    waitpid(child->number, NULL, 0);
}

static void check(const char *name, ssize_t moved, const unsigned char *bytes, size_t from) {
    size_t bad = 0;
    for (ssize_t at = 0; at < moved; at++) bad += bytes[at] != byte_at(from + at);
    printf("%s: %zd bytes, %zu wrong\n", name, moved, bad);
}

static unsigned char *buffer;

static void read_all(struct child *child) {
    struct iovec here = {buffer, BYTES}, there = {child->memory, BYTES};
    memset(buffer, 0, BYTES);
    check("all", process_vm_readv(child->number, &here, 1, &there, 1, 0), buffer, 0);
    // Local and remote pieces have different bounds, and the first piece is not of whole pages.
    struct iovec ours[3] = {{buffer, 5}, {buffer + 5, 3 * MIB}, {buffer + 5 + 3 * MIB, MIB}};
    struct iovec theirs[2] = {{child->memory + 77, 2 * MIB + 1}, {child->memory + 78 + 2 * MIB, 2 * MIB}};
    memset(buffer, 0, BYTES);
    ssize_t moved = process_vm_readv(child->number, ours, 3, theirs, 2, 0);
    check("pieces", moved, buffer, 77);
    // This call is made by its number, and for one byte.
    here.iov_len = 1;
    there.iov_base = child->memory + 7 * MIB;
    moved = syscall(SYS_process_vm_readv, child->number, &here, 1, &there, 1, 0);
    check("byte", moved, buffer, 7 * MIB);
}

static void errors(struct child *child) {
    struct iovec here = {buffer, BYTES}, there = {(void *)PAGE, PAGE};
    ssize_t moved = process_vm_readv(child->number, &here, 1, &there, 1, 0);
    printf("no memory: %zd, %s\n", moved, strerror(errno));
    there = (struct iovec){child->memory, BYTES};
    moved = process_vm_readv(child->number, &here, 2000, &there, 1, 0);
    printf("too many: %zd, %s\n", moved, strerror(errno));
    moved = process_vm_readv(child->number, NULL, 1, &there, 1, 0);
    printf("no list: %zd, %s\n", moved, strerror(errno));
    moved = process_vm_writev(child->number, &here, 1, &(struct iovec){(void *)PAGE, PAGE}, 1, 0);
    printf("no memory to write: %zd, %s\n", moved, strerror(errno));
    moved = process_vm_readv(child->number, &here, 1, &there, 1, 1);
    printf("flags: %zd, %s\n", moved, strerror(errno));
    moved = process_vm_writev(child->number, &here, 0, &there, 1, 1);
    printf("flags of nothing: %zd, %s\n", moved, strerror(errno));
    // At the end of all addresses, and beyond.
    for (long at = -2; at <= 2; at++) {
        there = (struct iovec){(void *)((at < 0 ? 0 : 1UL << 47) + at * PAGE), 4 * PAGE};
        moved = process_vm_readv(child->number, &here, 1, &there, 1, 0);
        printf("far: %zd, %s\n", moved, strerror(errno));
        moved = process_vm_writev(child->number, &here, 1, &there, 1, 0);
        printf("far to write: %zd, %s\n", moved, strerror(errno));
    }
    // These are more bytes than one call moves.
    there = (struct iovec){child->memory, 3UL << 30};
    memset(buffer, 0, BYTES);
    check("long", process_vm_readv(child->number, &here, 1, &there, 1, 0), buffer, 0);
}

static void write_all(struct child *child) {
    struct iovec here = {buffer, BYTES}, there = {child->memory, BYTES};
    for (size_t at = 0; at < BYTES; at++) buffer[at] = (unsigned char)~byte_at(at);
    printf("written: %zd\n", process_vm_writev(child->number, &here, 1, &there, 1, 0));
    char word = 'c';
    if (write(child->asked, &word, 1) != 1 || read(child->told, &word, 1) != 1) abort();
    printf("%s\n", word == 'g' ? "all as written" : "wrong bytes");
}

static int visit(int grows) {
    unsigned char *memory = map(BYTES);
    buffer = map(BYTES);
    if (!grows) grow();
    struct child child = begin(memory, grows);
    read_all(&child);
    errors(&child);
    write_all(&child);
    end(&child);
    return 0;
}

// Both are taken over.
static int large(void) { return visit(0); }

// The visitor is small, and not watched.
static int small(void) { return visit(1); }

// If a visitor is killed at any moment, no page of its host stays pinned.
static int killed(void) {
    grow();
    unsigned char *memory = map(BYTES);
    for (size_t at = 0; at < BYTES; at++) memory[at] = byte_at(at);
    pid_t host = getpid();
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            unsigned char *own = map(BYTES);
            struct iovec here = {own, BYTES}, there = {memory, BYTES};
            for (;;) process_vm_readv(host, &here, 1, &there, 1, 0);
        }
        usleep(5000 + 1000 * i);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    size_t bad = 0, in = BYTES / PAGE;
    int is_watched = getenv("UZSWAP_TREE") != NULL;
    for (int i = 0; is_watched && in > 0 && i < 300; i++) {
        unsigned char there[BYTES / PAGE];
        send_out(memory, BYTES);
        mincore(memory, BYTES, there);
        in = 0;
        for (size_t page = 0; page < BYTES / PAGE; page++) in += there[page] & 1;
        usleep(10000);
    }
    for (size_t at = 0; at < BYTES; at++) bad += memory[at] != byte_at(at);
    printf("%zu wrong, %zu pages stay\n", bad, is_watched ? in : 0);
    return 0;
}

// A stopped host does not answer, and no visitor waits long for such a host.
static int stopped(void) {
    unsigned char *memory = map(BYTES);
    buffer = map(BYTES);
    grow();
    struct child child = begin(memory, 0);
    kill(child.number, SIGSTOP);
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    struct iovec here = {buffer, BYTES}, there = {child.memory, BYTES};
    for (int i = 0; i < 20; i++) process_vm_readv(child.number, &here, 1, &there, 1, 0);
    clock_gettime(CLOCK_MONOTONIC, &after);
    printf("%s\n", after.tv_sec - before.tv_sec < 15 ? "soon" : "late");
    kill(child.number, SIGCONT);
    read_all(&child);
    end(&child);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        {"large", large}, {"small", small}, {"killed", killed}, {"stopped", stopped},
    };
    if (arguments < 2) return 2;
    end_after(120);
    return choose(all, sizeof all / sizeof *all, argument[1]);
}
