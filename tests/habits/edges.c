// Calls at the edges of the kernel's limits: buffers at the ends of pages, files that end within a
// block, lists longer than one call moves, strings and advice across memory of two kinds.
#include "habit.h"
#include <sys/socket.h>
#include <sys/uio.h>

enum { LONG = 10 * MIB };

static void say(const char *name, long answer) {
    printf("%s %ld %s\n", name, answer, answer < 0 ? strerror(errno) : "");
}

// Short buffers that touch three pages each, given to pipes by several threads.
enum { BUFFERS = 16, SHORT = PAGE + 2, TURNS = 2000, THREADS = 3 };
static void *splices(void *at) {
    unsigned char *memory = at, seen[BUFFERS * SHORT];
    struct iovec all[BUFFERS];
    int ends[2];
    long wrong = 0;
    if (pipe(ends)) return (void *)-1;
    for (int i = 0; i < BUFFERS; i++)
        all[i] = (struct iovec){ memory + i * 4 * PAGE + PAGE - 1, SHORT };
    for (int turn = 0; turn < TURNS; turn++) {
        long given = vmsplice(ends[1], all, BUFFERS, SPLICE_F_NONBLOCK);
        if (given != 5 * SHORT + 1 || read(ends[0], seen, sizeof seen) != given) return (void *)-2;
        for (long i = 0; i < given; i++) wrong += seen[i] != memory[0];
    }
    close(ends[0]);
    close(ends[1]);
    return (void *)wrong;
}
static int page_ends(void) {
    unsigned char *memory = map(THREADS * MIB);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) memset(memory + i * MIB, i + 1, MIB);
    grow();
    end_after(60);
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, splices, memory + i * MIB);
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        say("wrong", (long)wrong);
    }
    return 0;
}

// A file that is read past the page cache, and ends within a block.
enum { FILE_BYTES = 5 * MIB + 777 };
static int direct(void) {
    unsigned char *to = map(LONG);
    char name[] = "direct.XXXXXX";
    int written = mkstemp(name), file = open(name, O_RDONLY | O_DIRECT);
    unlink(name);
    for (int i = 0; i < FILE_BYTES; i++) to[i] = i % 251;
    if (file < 0 || write(written, to, FILE_BYTES) != FILE_BYTES || fsync(written)) return 2;
    grow();
    for (int turn = 0; turn < 4; turn++) {
        struct iovec parts[] = { { to, 3 * MIB }, { to + 3 * MIB, LONG - 3 * MIB } };
        long wrong = 0, start = turn < 2 ? 0 : 5 * MIB;
        memset(to, 255, LONG);
        send_out(to, LONG);
        lseek(file, start, SEEK_SET);
        long bytes = turn % 2 ? readv(file, parts, 2) : read(file, to, LONG);
        say("read", bytes);
        for (long i = 0; i < bytes; i++) wrong += to[i] != (start + i) % 251;
        printf("%ld wrong, at %ld\n", wrong, (long)lseek(file, 0, SEEK_CUR));
    }
    return 0;
}

// Lists whose total length is more than one call moves, or more than there are addresses.
static int long_lists(void) {
    unsigned char *to = map(LONG);
    char name[] = "list.XXXXXX";
    int file = mkstemp(name);
    size_t huge = 3UL << 30, beyond = 1UL << 47, negative = 1UL << 63;
    unlink(name);
    memset(to, 7, LONG);
    if (write(file, to, LONG) != LONG) return 2;
    grow();
    struct iovec lists[][2] = {
        { { to, 9 * MIB }, { to + 9 * MIB, huge } },
        { { to, huge }, { to, huge } },
        { { to, 9 * MIB }, { to + 9 * MIB, beyond } },
        { { to, 9 * MIB }, { to + 9 * MIB, negative } },
        { { to, 0 }, { to, 9 * MIB } },
    };
    for (int i = 0; i < 5; i++) {
        memset(to, 9, LONG);
        send_out(to, LONG);
        lseek(file, 0, SEEK_SET);
        say("readv", readv(file, lists[i], 2));
        printf("%d %d at %ld\n", to[0], to[LONG - 1], (long)lseek(file, 0, SEEK_CUR));
        say("preadv", preadv(file, lists[i], 2, MIB));
        send_out(to, LONG);
        // The same memory, shifted by half, if the list is as long as the memory.
        unsigned char *from = to + LONG / 2;
        struct iovec here = { to, MIB };
        lists[i][0].iov_base = from;
        lists[i][0].iov_len = 0;
        lists[i][1].iov_base = from;
        say("process", process_vm_readv(getpid(), &here, 1, lists[i], 2, 0));
    }
    for (long i = 1023; i <= 1025; i++) {
        struct iovec *many = calloc(i, sizeof *many);
        for (int at = 0; at < i; at++) many[at] = (struct iovec){ to, at == i - 1 ? 6 * MIB : 1 };
        lseek(file, 0, SEEK_SET);
        say("many", readv(file, many, i));
        say("none", readv(file, many, 0));
        free(many);
    }
    return 0;
}

// A program's argument begins in memory that stays, and goes on in memory that is out.
static int strings(void) {
    unsigned char *memory = map(LONG);
    memset(memory, 'x', LONG);
    grow();
    // Locked memory stays.
    mlock(memory + MIB, PAGE);
    munlock(memory + MIB, PAGE);
    char *argument = (char *)memory + MIB + PAGE - 10, *all[] = { "sh", "-c", "echo ${#1}", "sh", argument, NULL };
    argument[60000] = 0;
    for (int turn = 0; turn < 2; turn++) {
        send_out(memory, LONG);
        fflush(stdout);
        pid_t child = turn ? vfork() : fork();
        if (!child) {
            if (!turn) send_out(memory, LONG);
            execv("/bin/sh", all);
            _exit(errno);
        }
        int status;
        waitpid(child, &status, 0);
        printf("%d\n", status);
    }
    return 0;
}

// The kernel also removes guards behind a hole.
static int guards_behind_holes(void) {
    enum { INSTALL = 102, REMOVE = 103 };
    unsigned char *memory = map(4 * MIB);
    memset(memory, 5, 4 * MIB);
    grow();
    if (madvise(memory + 3 * MIB, PAGE, INSTALL)) return 3;
    munmap(memory + 2 * MIB, PAGE);
    say("removed", madvise(memory, 4 * MIB, REMOVE));
    long sum = memory[0] + memory[3 * MIB - 1] + memory[3 * MIB] + memory[4 * MIB - 1];
    printf("%ld\n", sum);
    return 0;
}

// Messages that all consist of one byte, again and again.
static int same_byte(void) {
    enum { MESSAGES = 1500, PARTS = 1024 };
    static struct mmsghdr list[MESSAGES];
    static struct iovec parts[PARTS];
    unsigned char *memory = map(MIB), seen[PARTS];
    int ends[2], status, wrong = 0;
    memset(memory, 6, MIB);
    for (int i = 0; i < PARTS; i++) parts[i] = (struct iovec){ memory + 5, 1 };
    for (int i = 0; i < MESSAGES; i++)
        list[i].msg_hdr = (struct msghdr){ .msg_iov = parts, .msg_iovlen = PARTS };
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, ends)) return 2;
    grow();
    pid_t child = fork();
    if (!child) {
        for (int i = 0; i < 1024; i++) wrong += recv(ends[1], seen, PARTS, 0) != PARTS || seen[9] != 6;
        _exit(wrong != 0);
    }
    say("sent", sendmmsg(ends[0], list, MESSAGES, 0));
    waitpid(child, &status, 0);
    printf("%d\n", status);
    return 0;
}

// Calls that the kernel refuses for their lengths bring nothing in.
static int refused(void) {
    enum { SIZES = 7 };
    unsigned char *memory = map(MIB), there = 0;
    unsigned long sizes[SIZES] = { 0, 63, 4097, 1UL << 47, 1UL << 63, -4096, -1 };
    memset(memory, 6, MIB);
    grow();
    int is_out = send_out(memory, MIB);
    for (int i = 0; i < SIZES; i++) {
        say("locks", syscall(SYS_set_robust_list, 0L, sizes[i]));
        say("child", syscall(SYS_clone3, 0L, sizes[i]));
        say("out", madvise(memory + 1, sizes[i], MADV_PAGEOUT));
        if (sizes[i] <= 1UL << 63) continue;
        say("advice", madvise(memory, sizes[i], MADV_DONTFORK));
        say("access", mprotect(memory, sizes[i], PROT_READ));
        say("guards", madvise(memory, sizes[i], 102));
    }
    mincore(memory, PAGE, &there);
    printf("%s %d\n", is_out && there & 1 ? "came in" : "as before", memory[MIB - 1]);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "page_ends", page_ends }, { "direct", direct }, { "long_lists", long_lists },
        { "strings", strings }, { "guards_behind_holes", guards_behind_holes },
        { "same_byte", same_byte }, { "refused", refused },
    };
    end_after(100);
    return arguments > 1 ? choose(all, sizeof all / sizeof *all, argument[1]) : 99;
}
