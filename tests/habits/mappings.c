// Mappings with special behaviour, and calls that change mappings.
#include "habit.h"
#include <dlfcn.h>
#include <linux/aio_abi.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <time.h>
#include <ucontext.h>

static const int ACCESS = PROT_READ | PROT_WRITE;

// Maps memory far from all other mappings, so that the kernel does not merge them.
static unsigned char *map_alone(long number, int flags) {
    void *at = mmap((void *)((3L << 40) + (number << 32)), 2 * MIB, ACCESS,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | flags, -1, 0);
    if (at == MAP_FAILED) abort();
    memset(at, number + 1, 2 * MIB);
    return at;
}

static int status_of(pid_t child) {
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Advice about children, given while the program was small.
static int children(void) {
    unsigned char *wiped = map_alone(0, 0), *absent = map_alone(1, 0), *shared = map_alone(2, 0);
    unsigned char *undone = map_alone(3, 0);
    madvise(wiped, 2 * MIB, MADV_WIPEONFORK);
    madvise(absent, 2 * MIB, MADV_DONTFORK);
    madvise(undone, 2 * MIB, MADV_DONTFORK);
    madvise(undone, 2 * MIB, MADV_DOFORK);
    grow();
    for (int i = 0; i < 2; i++) {
        pid_t child = fork();
        if (!child) {
            unsigned char is_there;
            int is_absent = mincore(absent, PAGE, &is_there) && errno == ENOMEM;
            _exit((wiped[3 * PAGE] != 0) + 2 * !is_absent + 4 * (shared[PAGE] != 3) +
                  8 * (undone[PAGE] != 4));
        }
        printf("child %d, here %d %d\n", status_of(child), wiped[PAGE], absent[PAGE]);
        fflush(stdout);
        send_out(wiped, 2 * MIB);
        send_out(shared, 2 * MIB);
    }
    return 0;
}

// Memory that no child inherits is paged out and in. A child may map other memory there.
enum { PARTS = 3 };
static int uninherited(void) {
    static const size_t sizes[PARTS] = { 8 * MIB, 14 * MIB, 4 * MIB };
    unsigned char *parts[PARTS] = { map(sizes[0]) }, *beside = NULL;
    memset(parts[0], 1, sizes[0]);
    madvise(parts[0], sizes[0], MADV_DONTFORK);
    grow();
    // Inherited pages are on both sides of the second part. At the start the last part is only
    // reserved.
    beside = map(16 * MIB);
    parts[1] = beside + MIB;
    parts[2] = mmap(NULL, sizes[2], PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memset(beside, 9, 16 * MIB);
    madvise(parts[1], sizes[1], MADV_DONTFORK);
    madvise(parts[2], sizes[2], MADV_DONTFORK);
    mprotect(parts[2], sizes[2], ACCESS);
    for (int i = 0; i < PARTS; i++)
        for (size_t at = 0; at < sizes[i]; at += PAGE) *(size_t *)(parts[i] + at) = at + i;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < PARTS; i++) send_out(parts[i], sizes[i] / 2);
        pid_t child = fork();
        if (!child) {
            int wrong = beside[0] != 9 || beside[15 * MIB] != 9;
            unsigned char is_there;
            for (int i = 0; i < PARTS; i++) {
                wrong |= (!mincore(parts[i], PAGE, &is_there) || errno != ENOMEM) << 1;
                wrong |= (mmap(parts[i], sizes[i], ACCESS, MAP_PRIVATE | MAP_ANONYMOUS |
                               MAP_FIXED_NOREPLACE, -1, 0) != parts[i]) << 2;
                for (size_t at = 0; at < sizes[i]; at += PAGE) wrong |= (parts[i][at] != 0) << 3;
                memset(parts[i], 5, sizes[i]);
            }
            grow();
            for (int i = 0; i < PARTS; i++)
                for (size_t at = 0; at < sizes[i]; at += PAGE) wrong |= (parts[i][at] != 5) << 4;
            _exit(wrong);
        }
        int right = 0;
        for (int i = 0; i < PARTS; i++)
            for (size_t at = 0; at < sizes[i]; at += PAGE)
                right += *(size_t *)(parts[i] + at) == at + i;
        printf("child %d, right %d\n", status_of(child), right);
        fflush(stdout);
    }
    return 0;
}

// Addresses that the program has unmapped, or that its child does not inherit, must stay free while
// other pages leave: the program maps memory there again.
static int map_again(unsigned char *hole, unsigned char *noise) {
    for (size_t at = 0; at < 16 * MIB; at += 8)
        *(unsigned long *)(noise + at) = (at + 1) * 0x9e3779b97f4a7c15 * (at | 1);
    send_out(noise, 16 * MIB);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    return mmap(hole, 14 * MIB, ACCESS, flags, -1, 0) == hole;
}
static int holes(void) {
    unsigned char *all = map(48 * MIB), *own = all + MIB, *given = all + 16 * MIB;
    memset(own, 1, 14 * MIB);
    madvise(own, 14 * MIB, MADV_DONTFORK);
    grow();
    pid_t child = fork();
    if (!child) _exit(!map_again(own, all + 32 * MIB));
    printf("child %d", status_of(child));
    munmap(given, 14 * MIB);
    printf(", here %d\n", map_again(given, all + 32 * MIB));
    return 0;
}

// A program that no process may trace forks.
static int undumpable(void) {
    unsigned char *memory = map_alone(0, 0);
    grow();
    send_out(memory, 2 * MIB);
    prctl(PR_SET_DUMPABLE, 0);
    pid_t child = fork();
    if (!child) _exit(memory[PAGE] + memory[MIB]);
    printf("child %d, dumpable %d\n", status_of(child), prctl(PR_GET_DUMPABLE));
    return 0;
}

// madvise must return the kernel's answers.
static int advice(void) {
    unsigned char *memory = map_alone(0, 0);
    grow();
    static const struct { const char *name; int advice, pages; } all[] = {
        { "remove", MADV_REMOVE, 16 }, { "populate", 22, 16 }, { "populate beyond", 22, 4096 },
        { "populate to write", 23, 16 }, { "page out beyond", MADV_PAGEOUT, 4096 },
        { "merge beyond", MADV_MERGEABLE, 4096 }, { "drop beyond", MADV_DONTNEED, 4096 },
        { "unknown", 4711, 1 },
    };
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++) {
        memset(memory, 9, 2 * MIB);
        send_out(memory, MIB);
        errno = 0;
        int answer = madvise(memory, (size_t)all[i].pages * PAGE, all[i].advice);
        printf("%s: %d %d, %d %d\n", all[i].name, answer, errno, memory[PAGE], memory[MIB]);
    }
    return 0;
}

// Moves of mappings: some fail, and some leave the source mapped.
static int moves(void) {
    unsigned char *target = map_alone(0, 0), *source = map_alone(1, 0);
    grow();
    send_out(target, 2 * MIB);
    void *nowhere = (void *)(9L << 40);
    void *moved = mremap(nowhere, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, target);
    printf("failed %d %d, %d\n", moved == MAP_FAILED, errno, target[PAGE]);
    send_out(source, MIB);
    unsigned char *left = (void *)syscall(SYS_mremap, source, 2 * MIB, 2 * MIB,
                                          MREMAP_MAYMOVE | 4, 0);
    int zeros = 0, moved_bytes = 0;
    for (long at = 0; left != MAP_FAILED && at < 2 * MIB; at += PAGE) {
        zeros += source[at] == 0;
        moved_bytes += left[at] == 2;
    }
    printf("left %d zeros, %d moved\n", zeros, moved_bytes);
    memset(source, 7, 2 * MIB);
    send_out(source, 2 * MIB);
    send_out(left, 2 * MIB);
    moved = mremap(left, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, target);
    printf("moved over %d, %d %d\n", moved == target, target[MIB], source[MIB]);
    return 0;
}

// Mappings with other properties than private memory.
static int kinds(void) {
    unsigned char *grows = map_alone(0, MAP_GROWSDOWN), *sealed = map_alone(1, 0);
    unsigned char *keyed = map_alone(2, 0), *late = map_alone(3, 0);
    int key = pkey_alloc(0, 0);
    if (key >= 0) pkey_mprotect(keyed, 2 * MIB, ACCESS, key);
    grow();
    for (int i = 1; i < 30; i++) grows[-i * PAGE] = i;
    send_out(sealed, 2 * MIB);
    syscall(462 /* mseal */, sealed, 2 * MIB, 0);
    send_out(late, 2 * MIB);
    if (key >= 0) pkey_mprotect(late, MIB, ACCESS, key);
    printf("%d %d %d %d %d\n", grows[-9 * PAGE], sealed[PAGE], keyed[PAGE], late[PAGE], late[MIB]);
    return 0;
}

// Memory below 2 GiB, where a garbage collector has its heap and its code.
#ifdef MAP_32BIT
static void *const hint = NULL;
#else
// A processor without the flag places it by a hint.
#define MAP_32BIT 0
static void *const hint = (void *)(1L << 30);
#endif
static int low(void) {
    grow();
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, is_watched = getenv("UZSWAP_TREE") != NULL;
    unsigned char *memory = mmap(hint, 8 * MIB, ACCESS, flags, -1, 0);
    if (memory == MAP_FAILED) return 2;
    memset(memory, 7, 8 * MIB);
    int stays = is_watched && !send_out(memory, 8 * MIB);
    printf("%d %s\n", memory[5 * MIB], stays ? "stays" : "may leave");
    return 0;
}

// Memory without huge pages. The kernel joins it with a thread's stack that begins below it. Before
// Linux 6.7 the kernel merges any memory with such a stack.
static int joined(void) {
    int is_watched = getenv("UZSWAP_TREE") != NULL;
    unsigned char *memory = mmap(NULL, 64 * MIB + PAGE, ACCESS, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(memory, 64 * MIB + PAGE, MADV_NOHUGEPAGE);
    for (int at = 0; at < 64; at++) {
        memset(memory + at * MIB, at, MIB);
        usleep(10000);
    }
    int stays = is_watched && !send_out(memory + MIB, 8 * MIB);
    printf("%d %s\n", memory[5 * MIB], stays ? "stays" : "may leave");
    return 0;
}

// Much memory is written once and then only read.
static int read_only(void) {
    enum { PIECES = 90 };
    static unsigned *piece[PIECES];
    unsigned number = 1, sum = 0;
    grow();
    for (int i = 0; i < PIECES; i++) {
        piece[i] = (unsigned *)map(MIB);
        for (int at = 0; at < MIB / 4; at++)
            piece[i][at] = at % 16 ? (unsigned)(at * i) : (number = number * 1664525 + 1013904223);
        mprotect(piece[i], MIB, PROT_READ);
        usleep(3000);
    }
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < PIECES; i++)
            for (int at = 0; at < MIB / 4; at += 16) sum = sum * 31 + piece[i][at];
    mprotect(piece[5], MIB, ACCESS);
    piece[5][7] = 1;
    printf("%u, %u\n", sum, piece[5][7]);
    return 0;
}

// Calls from elsewhere than the C library: from the vDSO, and from a library that is loaded late.
static int elsewhere(void) {
    struct timespec *time = (void *)(map_alone(0, 0) + 5 * PAGE);
    unsigned char *text = map_alone(1, 0);
    int ends[2];
    if (pipe(ends)) return 1;
    grow();
    send_out(time, PAGE);
    time = (void *)((long)time & -(long)PAGE);
    int answer = clock_gettime(CLOCK_PROCESS_CPUTIME_ID, time);
    printf("time %d %d\n", answer, time->tv_sec < 60);
    void *library = dlopen("./library.so", RTLD_NOW);
    long (*call)(long, long, long, long) = library ? dlsym(library, "call") : NULL;
    send_out(text, 2 * MIB);
    printf("library %d, %ld\n", call != NULL, call ? call(SYS_write, ends[1], (long)text, 3000) : 0);
    return 0;
}

static long (*calls[400])(long, long, long, long);
static volatile int has_grown;

// Loads copies of the library one after another.
static void *load_copies(void *count) {
    static char bytes[MIB];
    int file = open("library.so", O_RDONLY);
    long length = read(file, bytes, MIB);
    close(file);
    for (int *at = count; *at < 400 && !has_grown; usleep(500)) {
        char name[] = "./copyXXXXXX";
        file = mkstemp(name);
        if (file < 0 || write(file, bytes, length) != length || close(file)) abort();
        void *library = dlopen(name, RTLD_NOW);
        unlink(name);
        if (!library || !(calls[(*at)++] = dlsym(library, "call"))) abort();
    }
    return NULL;
}

// Calls from libraries that are loaded while the program is taken over.
static int meanwhile(void) {
    unsigned char *text = map_alone(1, 0), *read_back = map_alone(0, 0);
    int ends[2], count = 0, failed = 0;
    pthread_t loader;
    if (pipe(ends) || pthread_create(&loader, NULL, load_copies, &count)) return 1;
    grow();
    has_grown = 1;
    pthread_join(loader, NULL);
    for (int i = 0; i < count; i++) {
        send_out(text, 2 * MIB);
        long written = calls[i](SYS_write, ends[1], (long)text + i * PAGE, 3000);
        if (written != 3000 || read(ends[0], read_back, 3000) != 3000) failed++;
    }
    printf("%d calls failed\n", failed);
    return 0;
}

// Asynchronous reads, by a context from before the takeover and by a context from after it.
static int asynchronous(void) {
    aio_context_t early = 0, late = 0;
    if (syscall(SYS_io_setup, 8, &early)) return 0;
    int file = open("program.c", O_RDONLY);
    unsigned char *memory = map_alone(0, 0);
    grow();
    syscall(SYS_io_setup, 8, &late);
    aio_context_t all[] = { early, late };
    for (int i = 0; i < 2; i++) {
        send_out(memory, 2 * MIB);
        struct iocb request = { .aio_fildes = file, .aio_lio_opcode = IOCB_CMD_PREAD,
                                .aio_buf = (long)memory + i * MIB, .aio_nbytes = 100 };
        struct iocb *list = &request;
        struct io_event event = { 0 };
        long in = syscall(SYS_io_submit, all[i], 1, &list);
        long out = syscall(SYS_io_getevents, all[i], 1, 1, &event, NULL);
        printf("%ld %ld %lld %c\n", in, out, (long long)event.res, memory[i * MIB]);
    }
    return 0;
}

// A program forbids itself nearly all calls when it is large.
static int filtered(void) {
    unsigned char *memory = map_alone(0, 0);
    grow();
    send_out(memory, 2 * MIB);
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 1;
    char line[] = "the bytes are right\n";
    for (long at = 0; at < 2 * MIB; at += PAGE)
        if (memory[at] != 1) memcpy(line + 14, "wrong", 5);
    _exit(write(1, line, sizeof line - 1) < 0);
}

// Uses far more addresses than memory.
static int sparse(void) {
    grow();
    size_t bytes = 200L << 30, step = 5L << 30;
    unsigned char *memory = mmap(NULL, bytes, ACCESS,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return 1;
    long sum = 0;
    for (size_t at = 0; at < bytes; at += step) memory[at] = at / step + 1;
    send_out(memory, 10 * MIB);
    munmap(memory + 2 * step, step);
    for (size_t at = 0; at < bytes; at += step)
        if (at / step != 2) sum += memory[at] + memory[at + PAGE];
    pid_t child = fork();
    if (!child) _exit(memory[0] == 1 && memory[step] == 2 && memory[7 * step + MIB] == 0 ? 5 : 6);
    printf("%ld, child %d\n", sum, status_of(child));
    return munmap(memory, bytes);
}

// Memory that is allocated early and used late: stacks of coroutines in the heap, and single pages
// of a large reservation.
enum { COROUTINES = 900, COROUTINE = 64 << 10 };
static ucontext_t hub, coroutines[COROUTINES];
static unsigned char *reserved;
static long late_sum;
static void use_late(int number) {
    volatile unsigned char mine[44 << 10];
    for (size_t at = 0; at < sizeof mine; at++) mine[at] = number + at / 999;
    reserved[(size_t)number << 30] = number;
    usleep(500);
    swapcontext(&coroutines[number], &hub);
    for (size_t at = 0; at < sizeof mine; at += 64) late_sum += mine[at];
    late_sum += reserved[(size_t)number << 30] + reserved[((size_t)number << 30) + MIB];
}
static int late(void) {
    reserved = mmap(NULL, 1L << 40, ACCESS, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return 1;
    for (int i = 0; i < COROUTINES; i++) {
        getcontext(&coroutines[i]);
        coroutines[i].uc_stack.ss_sp = malloc(COROUTINE);
        coroutines[i].uc_stack.ss_size = COROUTINE;
        coroutines[i].uc_link = &hub;
        makecontext(&coroutines[i], (void (*)(void))use_late, 1, i);
    }
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < COROUTINES; i++) swapcontext(&hub, &coroutines[i]);
    printf("%ld\n", late_sum);
    return 0;
}

// The program's threads have the names of our threads, and map and unmap memory during the
// take-over.
static volatile int is_grown;
static void *map_and_unmap(void *name) {
    prctl(PR_SET_NAME, name);
    for (long turn = 0; !is_grown; turn++) {
        size_t bytes = (turn % 16 + 1) * (MIB / 4);
        unsigned char *at = map(bytes);
        for (size_t i = 0; i < bytes; i += PAGE) at[i] = turn + i / PAGE;
        for (size_t i = 0; i < bytes; i += PAGE)
            if (at[i] != (unsigned char)(turn + i / PAGE)) abort();
        munmap(at, bytes);
    }
    return NULL;
}
static int named_as_ours(void) {
    char *names[] = { "uzswap-agent", "uzswap-look", "uzswap-reclaim" };
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, map_and_unmap, names[i]);
    prctl(PR_SET_NAME, "uzswap-ahead");
    grow();
    is_grown = 1;
    for (int i = 0; i < 3; i++) printf("%d\n", pthread_join(threads[i], NULL));
    return 0;
}

// Code that is loaded late: in a mapping longer than its file, in a mapping that may be written,
// and in a mapping that may only be executed. The code returns the process number.
static int code(void) {
    static const unsigned char identity[] = { 0xb8, SYS_getpid, 0, 0, 0, 0x0f, 0x05, 0xc3 };
    static const unsigned char number[] = { 0xb8, 7, 0, 0, 0, 0xc3 };
    static const int kinds[] = { PROT_READ, ACCESS, 0 };
    int file = memfd_create("code", 0);
    if (write(file, identity, sizeof identity) < 0) return 1;
    grow();
    for (int i = 0; i < 3; i++) {
        void *at = mmap(NULL, MIB, kinds[i] | PROT_EXEC, MAP_PRIVATE, file, 0);
        if (at == MAP_FAILED) return 1;
        int (*made)(void) = (int (*)(void))at;
        printf("%d", made() == getpid());
        if (kinds[i] & PROT_WRITE) {
            memcpy(at, number, sizeof number);
            printf(", written %d", made());
        }
        printf("\n");
        munmap(at, MIB);
    }
    return close(file);
}

// Code with a system call in it, which the program made writable before the takeover. It must not
// change.
#ifdef __x86_64__
asm(".text; .balign 4096\n"
    "own_write: .cfi_startproc; mov $1, %eax; syscall; ret; .cfi_endproc\n"
    "own_number: .cfi_startproc; mov $1, %eax; ret; .cfi_endproc; .balign 4096");
static const unsigned char seven[] = { 0xb8, 7, 0, 0, 0 };
#else
asm(".text; .balign 4096\n"
    "own_write: .cfi_startproc; mov x8, #64; svc #0; ret; .cfi_endproc\n"
    "own_number: .cfi_startproc; mov w0, #1; ret; .cfi_endproc; .balign 4096");
static const unsigned char seven[] = { 0xe0, 0, 0x80, 0x52 };
#endif
long own_write(int, const char *, long) __attribute__((visibility("hidden")));
int own_number(void) __attribute__((visibility("hidden")));
static int own_code(void) {
    if (mprotect((void *)own_write, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC)) return 1;
    grow();
    memcpy((void *)own_number, seven, sizeof seven);
    __builtin___clear_cache((char *)own_number, (char *)own_number + sizeof seven);
    printf("%d\n", own_number());
    fflush(stdout);
    return own_write(1, "written\n", 8) != 8;
}

// Code in writable memory without a file, like the heap of a Lisp system, made before and after the
// takeover.
enum { FUNCTIONS = 3072 };
static unsigned char *written[2];
// Each function lies in two pages.
#ifdef __x86_64__
enum { BEFORE_END = PAGE - 3 };
static void write_function(unsigned char *start, int number) {
    start[0] = 0xb8, memcpy(start + 1, &number, 4), start[5] = 0xc3;
}
#else
enum { BEFORE_END = PAGE - 4 };
static void write_function(unsigned char *start, int number) {
    unsigned code[] = { 0x52800000 | (unsigned)number << 5, 0xd65f03c0 };
    memcpy(start, code, sizeof code);
    __builtin___clear_cache((char *)start, (char *)start + sizeof code);
}
#endif
static void write_functions(int part) {
    unsigned char *at = mmap(NULL, FUNCTIONS * PAGE, ACCESS | PROT_EXEC,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) abort();
    for (int i = 0; i < FUNCTIONS; i += 2) write_function(at + i * PAGE + BEFORE_END, i + part);
    written[part] = at;
}
static long call_functions(int part) {
    long sum = 0;
    for (int i = 0; i < FUNCTIONS; i += 2) {
        unsigned char *start = written[part] + i * PAGE + BEFORE_END;
        sum += ((int (*)(void))start)();
    }
    return sum;
}
static int written_code(void) {
    write_functions(0);
    grow();
    write_functions(1);
    for (int round = 0; round < 3; round++) {
        for (int part = 0; part < 2; part++) {
            send_out(written[part], FUNCTIONS * PAGE);
            // Memory that stays may be in another test's swap now, and comes back.
            printf("%ld ", call_functions(part));
        }
        usleep(500000);
    }
    printf("\n");
    return 0;
}

// A segment of shared memory is attached over the program's memory, up to a page beyond its end.
// The memory beside it must stay.
static int attached(void) {
    unsigned char *at = map(4 * MIB);
    memset(at, 1, 4 * MIB);
    grow();
    send_out(at, 4 * MIB);
    int segment = shmget(IPC_PRIVATE, MIB + 5, IPC_CREAT | 0600);
    unsigned char *middle = shmat(segment, at + MIB + 9, SHM_REMAP | SHM_RND);
    printf("%d %d %d", middle == at + MIB, middle[5], middle[MIB + PAGE - 1]);
    memset(middle, 2, MIB + PAGE);
    printf(" %d", shmat(segment, at + 9, SHM_REMAP) == (void *)-1 ? errno : 0);
    pid_t child = fork();
    if (!child) {
        memset(middle, 3, PAGE);
        _exit(at[0] + at[2 * MIB + PAGE] + at[4 * MIB - 1]);
    }
    printf(" %d", status_of(child));
    shmctl(segment, IPC_RMID, NULL);
    send_out(at, 4 * MIB);
    printf(" %d %d %d %d", at[MIB - 1], middle[0], middle[PAGE], at[2 * MIB + PAGE]);
    shmdt(middle);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    unsigned char *again = mmap(middle, MIB + PAGE, ACCESS, flags, -1, 0);
    printf(" %d %d %d\n", again == middle, again[PAGE], at[3 * MIB]);
    return 0;
}

// If this kernel supports it, the kernel turns this thread's system calls into signals when the
// thread asks for that.
static char is_dispatched;
static void dispatch(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    is_dispatched = 0;
    ANSWER_OF(context) = 777;
}
static int dispatched(void) {
    unsigned char *memory = map(8 * MIB);
    memset(memory, 5, 8 * MIB);
    grow();
    send_out(memory, 8 * MIB);
    struct sigaction action = { .sa_sigaction = dispatch, .sa_flags = SA_SIGINFO };
    sigaction(SIGSYS, &action, NULL);
    int is_refused = prctl(59, 1L, 0L, 0L, &is_dispatched);
    long sum = 0;
    for (int turn = 0; turn < 4; turn++) {
        is_dispatched = 1;
        for (long i = turn * PAGE; i < 8 * MIB; i += 4 * PAGE) sum += memory[i];
        sum += is_refused ? 777 : syscall(SYS_getppid);
    }
    memset(map(16 * MIB), 1, 16 * MIB);
    printf("%ld\n", sum);
    return 0;
}

static void *use_stack(void *given) {
    volatile unsigned char own[96 << 10];
    for (size_t i = 0; i < sizeof own; i += PAGE) own[i] = i / PAGE + *(int *)given;
    size_t sum = 0;
    for (size_t i = 0; i < sizeof own; i += PAGE) sum += own[i];
    return (void *)sum;
}

// An allocator's pieces of 1 MiB have a guard page behind each header. Stacks have guard pages as
// well, and later threads use these stacks again.
static int guarded(void) {
    enum { COUNT = 32, THREADS = 8 };
    unsigned char *pieces = map(COUNT * MIB);
    for (size_t i = 0; i < COUNT; i++) {
        mprotect(pieces + i * MIB + 2 * PAGE, PAGE, PROT_NONE);
        memset(pieces + i * MIB + 3 * PAGE, i + 1, MIB - 3 * PAGE);
    }
    size_t sum = 0;
    for (int round = 0; round < 3; round++) {
        pthread_t threads[THREADS];
        int numbers[THREADS];
        for (int i = 0; i < THREADS; i++) {
            numbers[i] = i + round;
            pthread_create(&threads[i], NULL, use_stack, &numbers[i]);
        }
        for (int i = 0; i < THREADS; i++) {
            void *one;
            pthread_join(threads[i], &one);
            sum += (size_t)one;
        }
        if (!round) grow();
        for (size_t i = 0; i < COUNT; i++) sum += pieces[i * MIB + 9 * PAGE + round];
    }
    printf("%zu\n", sum);
    return 0;
}

// Like some servers, the program writes a title over the environment and clears the environment.
// Only then does the program grow, by memory that does not compress.
extern char **environ;
static int titled(void) {
    for (char **one = environ; *one; one++) memset(*one, ' ', strlen(*one));
    clearenv();
    enum { COUNT = 64 };
    unsigned *parts[COUNT], number = 1, sum = 0;
    for (int i = 0; i < COUNT; i++) {
        parts[i] = (unsigned *)map(MIB);
        for (size_t at = 0; at < MIB / sizeof number; at++) {
            number ^= number << 13;
            number ^= number >> 17;
            number ^= number << 5;
            parts[i][at] = number;
        }
        usleep(4000);
    }
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < COUNT; i++)
            for (size_t at = 0; at < MIB / sizeof number; at += 512) sum += parts[i][at];
    printf("%u\n", sum);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "children", children }, { "uninherited", uninherited }, { "undumpable", undumpable },
        { "advice", advice }, { "moves", moves }, { "kinds", kinds }, { "read_only", read_only },
        { "elsewhere", elsewhere }, { "meanwhile", meanwhile },
        { "asynchronous", asynchronous }, { "filtered", filtered },
        { "sparse", sparse }, { "late", late }, { "low", low }, { "joined", joined },
        { "named_as_ours", named_as_ours }, { "code", code }, { "own_code", own_code },
        { "written_code", written_code }, { "holes", holes },
        { "guarded", guarded }, { "titled", titled },
        { "attached", attached }, { "dispatched", dispatched },
    };
    return choose(all, sizeof all / sizeof *all, arguments > 1 ? argument[1] : "");
}
