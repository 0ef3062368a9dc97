// Memory that may be written and executed at the same time, as just-in-time compilers use it.
#include "habit.h"
#include <sys/prctl.h>
#include <ucontext.h>

enum { ALL = PROT_READ | PROT_WRITE | PROT_EXEC, BYTES = 1 << 20 };

static unsigned char *map_all(size_t bytes, int access) {
    void *at = mmap(NULL, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) abort();
    return at;
}

// Puts a function that returns a number: mov eax, NUMBER; ret; on aarch64 mov w0, NUMBER; ret.
#ifdef __aarch64__
enum { HALF = 4 };
static void put_function(unsigned char *at, int number) {
    unsigned code[] = { 0x52800000 | number << 5, 0xd65f03c0 };
    memcpy(at, code, sizeof code);
    __builtin___clear_cache((char *)at, (char *)at + sizeof code);
}
#else
enum { HALF = 3 };
static void put_function(unsigned char *at, int number) {
    at[0] = 0xb8, memcpy(at + 1, &number, 4), at[5] = 0xc3;
}
#endif
static int write_function(unsigned char *at, int number) {
    put_function(at, number);
    return ((int (*)(void))at)();
}

// Writes a function that calls `write`, and calls it. The memory that `write` reads is out.
static int write_call(unsigned char *at) {
#ifdef __aarch64__
    // mov x8, 64; svc 0; ret
    static const unsigned code[] = { 0xd2800808, 0xd4000001, 0xd65f03c0 };
#else
    // mov eax, 1; xor r8d, r8d; syscall; ret
    static const unsigned char code[] = { 0xb8, 1, 0, 0, 0, 0x45, 0x31, 0xc0, 0x0f, 0x05, 0xc3 };
#endif
    unsigned char *data = memset(map(8 * MIB), 7, 8 * MIB);
    int ends[2];
    if (pipe(ends)) return 2;
    madvise(data, 8 * MIB, MADV_PAGEOUT);
    memcpy(at, code, sizeof code);
    __builtin___clear_cache((char *)at, (char *)at + sizeof code);
    printf("%ld\n", ((long (*)(int, void *, size_t))at)(ends[1], data + 100000, 30000));
    return 0;
}

// The memory is mapped before the program is taken over, and a part of it has code at the
// take-over.
static int mapped_before(void) {
    unsigned char *at = map_all(BYTES, ALL);
    int number = write_function(at, 5);
    grow();
    return number != 5 ? 3 : write_call(at + 70000);
}
static int mapped_after(void) {
    grow();
    return write_call(map_all(BYTES, ALL) + 70000);
}
static int mapped_unreadable(void) {
    grow();
    return write_call(map_all(BYTES, PROT_WRITE | PROT_EXEC) + 70000);
}
static int protected_after(void) {
    grow();
    unsigned char *at = map(BYTES), *reserved = map_all(BYTES, PROT_NONE);
    if (mprotect(at, BYTES, ALL) || mprotect(reserved, BYTES, ALL)) return 4;
    return write_function(at + 5000, 9) != 9 ? 3 : write_call(reserved + 70000);
}
static int behind_other_code(void) {
    grow();
    unsigned char *at = map_all(BYTES, ALL);
    for (int i = 0; i < 100; i++)
        if (write_function(at + i * 1000, i) != i) return 3;
    return write_call(at + 130 * 1000);
}
static int moved(void) {
    grow();
    unsigned char *at = map_all(BYTES, ALL);
    if (write_function(at + BYTES / 2, 5) != 5) return 3;
    unsigned char *to = mremap(at, BYTES, 2 * BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, map(4 * MIB));
    if (to == MAP_FAILED || ((int (*)(void))(to + BYTES / 2))() != 5) return 5;
    return write_call(to + BYTES + 70000);
}
static int in_a_child(void) {
    unsigned char *at = map_all(BYTES, ALL);
    grow();
    pid_t child = fork();
    if (!child) {
        grow();
        int status = write_call(at + 70000);
        fflush(stdout);
        _exit(status);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

// In all habits from here on, no code makes a call, and the output is the same as with all of the
// memory.

static unsigned char *shared;
static void *many(void *part) {
    long sum = 0, first = (long)part;
    for (int round = 0; round < 4; round++)
        for (long i = 0; i < 2000; i++) sum += ((int (*)(void))(shared + i * 1024))();
    for (long i = 0; i < 500; i++) sum += write_function(shared + 3 * MIB + (i * 4 + first) * 512, i);
    return (void *)sum;
}
static int threads(void) {
    grow();
    shared = map_all(6 * MIB, ALL);
    for (int i = 0; i < 2000; i++) put_function(shared + i * 1024, i);
    pthread_t all[4];
    for (long i = 0; i < 4; i++) pthread_create(all + i, NULL, many, (void *)i);
    for (int i = 0; i < 4; i++) {
        void *sum;
        pthread_join(all[i], &sum);
        printf("%ld ", (long)sum);
    }
    printf("\n");
    return 0;
}

static void *changes(void *at) {
    for (int i = 0; i < 300; i++) {
        if (mprotect(at, BYTES, PROT_READ | PROT_EXEC) || mprotect(at, BYTES, ALL)) abort();
    }
    return NULL;
}
// One thread executes memory. Another thread changes the memory's access, but never takes the
// execution away.
static int changed(void) {
    grow();
    unsigned char *at = map_all(BYTES, ALL);
    for (int i = 0; i < BYTES / PAGE; i++) put_function(at + i * PAGE, i);
    pthread_t other;
    long sum = 0;
    pthread_create(&other, NULL, changes, at);
    for (int round = 0; round < 60; round++)
        for (int i = 0; i < BYTES / PAGE; i++) sum += ((int (*)(void))(at + i * PAGE))();
    pthread_join(other, NULL);
    printf("%ld\n", sum);
    return 0;
}

static sigjmp_buf back;
static volatile long seen;
static void note(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    seen = (long)info->si_addr;
    siglongjmp(back, info->si_code);
}
// Memory that is not executable stays so, and a fetch from it runs the program's handler.
static int denied(void) {
    struct sigaction action = { .sa_sigaction = note, .sa_flags = SA_SIGINFO };
    sigaction(SIGSEGV, &action, NULL);
    grow();
    unsigned char *at = map_all(BYTES, ALL);
    printf("%d", write_function(at, 1));
    mprotect(at, BYTES, PROT_READ | PROT_WRITE);
    for (int i = 0; i < 3; i++) {
        unsigned char *page = i == 2 ? map(PAGE) : at + i * 8 * PAGE;
        int code = sigsetjmp(back, 1);
        if (!code) write_function(page, 2);
        printf(", %d %d", code, seen == (long)page);
    }
    int code = (munmap(at, BYTES), sigsetjmp(back, 1));
    if (!code) ((int (*)(void))at)();
    printf(", %d %d\n", code, seen == (long)at);
    return 0;
}

static volatile sig_atomic_t is_called;
static void *blocked(void *at) {
    sigset_t all;
    sigfillset(&all);
    syscall(SYS_rt_sigprocmask, SIG_BLOCK, &all, NULL, 8);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    return (void *)(long)write_function(at, 11);
}
// A thread that blocks all signals, a handler in such memory, and children.
static int places(void) {
    grow();
    unsigned char *at = map_all(BYTES, ALL);
    pthread_t thread;
    void *number;
    pthread_create(&thread, NULL, blocked, at);
    pthread_join(thread, &number);
#ifdef __aarch64__
    // adr x1, . + 16; mov w2, 1; str w2, [x1]; ret; the variable
    static const unsigned handler[] = { 0x10000081, 0x52800022, 0xb9000022, 0xd65f03c0, 0 };
    enum { VARIABLE = 16 };
#else
    // mov dword [rip + 1], 1; ret; the variable
    static const unsigned char handler[] = { 0xc7, 0x05, 1, 0, 0, 0, 1, 0, 0, 0, 0xc3, 0, 0, 0, 0 };
    enum { VARIABLE = 11 };
#endif
    memcpy(at + 3 * PAGE, handler, sizeof handler);
    __builtin___clear_cache((char *)at + 3 * PAGE, (char *)at + 3 * PAGE + sizeof handler);
    signal(SIGUSR1, (void (*)(int))(at + 3 * PAGE));
    raise(SIGUSR1);
    int status[2] = { -1, -1 };
    pid_t child = fork();
    if (!child) _exit(write_function(at + 5 * PAGE, 21));
    waitpid(child, status, 0);
    child = vfork();
    if (!child) _exit(write_function(at + 7 * PAGE, 22));
    waitpid(child, status + 1, 0);
    printf("%ld %d %d %d", (long)number, at[3 * PAGE + VARIABLE], WEXITSTATUS(status[0]), WEXITSTATUS(status[1]));
    // The function lies across two pages, and begins at the end of the last page that was executed.
    printf(" %d\n", write_function(at + 8 * PAGE - HALF, 23));
    return 0;
}

// Memory can no longer become executable.
static int refused(void) {
    grow();
    unsigned char *at = map_all(BYTES, ALL);
    int is_refused = prctl(65 /* PR_SET_MDWE */, 1, 0, 0, 0);
    printf("%d %d\n", is_refused, write_function(at + 5000, 3));
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "mapped_before", mapped_before }, { "mapped_after", mapped_after },
        { "mapped_unreadable", mapped_unreadable }, { "protected_after", protected_after },
        { "behind_other_code", behind_other_code }, { "moved", moved },
        { "in_a_child", in_a_child }, { "threads", threads }, { "changed", changed },
        { "denied", denied }, { "places", places }, { "refused", refused },
    };
    return choose(all, sizeof all / sizeof *all, argument[arguments - 1]);
}
