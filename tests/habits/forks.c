// Forks in all the ways in which programs make them, and the state that programs rely on during a
// fork.
#include "habit.h"
#include <dirent.h>
#include <semaphore.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>

static unsigned char *memory;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void take(void) { pthread_mutex_lock(&lock); }
static void give(void) { pthread_mutex_unlock(&lock); }

// Waits for a child, and returns true if its status says that all is right.
static int is_well(pid_t child) {
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static void *map_under_lock(void *unused) {
    for (;;) {
        take();
        munmap(map(5 * MIB), 5 * MIB);
        give();
    }
    return unused;
}
static void *touch_under_lock(void *unused) {
    for (unsigned long s = 1;; s = s * 6364136223846793005UL + 1442695040888963407UL) {
        take();
        for (int i = 0; i < 40; i++) memory[(s >> 20) * (i + 1) % (40 * MIB)]++;
        give();
        sched_yield();
    }
    return unused;
}
static int fork_on(void *(*meanwhile)(void *), int forks) {
    pthread_t thread;
    int well = 0;
    end_after(40);
    pthread_atfork(take, give, give);
    pthread_create(&thread, NULL, meanwhile, NULL);
    for (int i = 0; i < forks; i++) {
        pid_t child = fork();
        if (!child) _exit(0);
        well += is_well(child);
    }
    printf("%d forks\n", well);
    fflush(stdout);
    _exit(0);
}
// Forks while another thread holds the lock that handlers of `fork` take, with memory to spare.
static int locked(void) {
    memset(malloc(20 * MIB), 1, 20 * MIB);
    usleep(200000);
    return fork_on(map_under_lock, 300);
}
// As `locked`, when memory is short.
static int locked_and_short(void) {
    memory = map(40 * MIB);
    for (long i = 0; i < 40 * MIB; i++) memory[i] = i * 31 >> 5;
    grow();
    return fork_on(touch_under_lock, 40);
}

// A thread that holds this lock interrupts another thread by a signal, and waits until the handler
// runs.
static sem_t stands;
static pthread_t first;
static void stand(int signal) { (void)signal, sem_post(&stands); }
static void *stop_first(void *unused) {
    for (;; usleep(100)) {
        take();
        pthread_kill(first, SIGUSR1);
        while (sem_wait(&stands));
        give();
    }
    return unused;
}
static int stopped(void) {
    struct sigaction action = { .sa_handler = stand, .sa_flags = SA_RESTART };
    memset(malloc(20 * MIB), 1, 20 * MIB);
    usleep(200000);
    sem_init(&stands, 0, 0);
    sigaction(SIGUSR1, &action, NULL);
    first = pthread_self();
    return fork_on(stop_first, 200);
}

// A child that was made without `fork` reads absent memory, grows, and forks.
static int child_work(void) {
    for (long i = 0; i < 20 * MIB; i += PAGE)
        if (memory[i] != (unsigned char)(i >> 12)) return 2;
    // Without `volatile`, some compilers leave this memory out.
    unsigned char *volatile more = malloc(30 * MIB);
    memset(more, 5, 30 * MIB);
    usleep(50000);
    pid_t child = fork();
    if (!child) _exit(memory[PAGE] == 1 && more[MIB] == 5 ? 0 : 3);
    return is_well(child) ? 0 : 4;
}
static int run_child(void *at) { return *(unsigned char *)at == 5 ? child_work() : 5; }
pid_t _Fork(void) __attribute__((weak));
// On x86-64, a call that uzswap replaces by a trap, since the instruction before it jumps.
static long parent_by_trap(void) {
    long number = SYS_getppid;
#ifdef __x86_64__
    __asm__ volatile("jmp 1f; 1: syscall" : "+a"(number) : : "rcx", "r11", "memory");
    return number;
#else
    return syscall(number);
#endif
}
// The parent traces its child and suppresses the signals of faults and of replaced calls. Without
// uzswap there are no such signals.
static int traces(void) {
    memory = map(20 * MIB);
    for (long i = 0; i < 20 * MIB; i++) memory[i] = i >> 12;
    grow();
    send_out(memory, 20 * MIB);
    pid_t child = fork();
    if (!child) {
        if (ptrace(PTRACE_TRACEME, 0, 0, 0)) _exit(1);
        raise(SIGSTOP);
        _exit(parent_by_trap() == getppid() ? child_work() : 6);
    }
    int status = 0, stops = 0;
    while (waitpid(child, &status, 0) == child && WIFSTOPPED(status) && stops++ < 1000)
        ptrace(PTRACE_CONT, child, 0, 0);
    if (WIFSTOPPED(status)) kill(child, SIGKILL);
    printf("%d stops, %d\n", stops, status);
    return 0;
}

static int ways(void) {
    memory = map(20 * MIB);
    for (long i = 0; i < 20 * MIB; i++) memory[i] = i >> 12;
    grow();
    send_out(memory, 20 * MIB);
    pid_t child = syscall(SYS_fork);
    if (!child) _exit(child_work());
    printf("fork %d\n", is_well(child));
    child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (!child) _exit(child_work());
    printf("clone %d\n", is_well(child));
    struct { unsigned long words[11]; } given = { { 0, 0, 0, 0, SIGCHLD } };
    child = syscall(SYS_clone3, &given, 88);
    if (!child) _exit(child_work());
    printf("clone3 %d\n", is_well(child));
    child = _Fork ? _Fork() : fork();
    if (!child) _exit(child_work());
    printf("_Fork %d\n", is_well(child));
    unsigned char *stack = malloc(MIB);
    child = clone(run_child, stack + MIB, SIGCHLD, memory + 5 * PAGE);
    printf("on a stack %d\n", is_well(child));
    fflush(stdout);
    child = fork();
    if (!child) {
        int ends[2], well = 9;
        if (pipe(ends)) _exit(1);
        pid_t other = fork();
        if (!other) {
            if (daemon(1, 1)) _exit(1);
            well = child_work();
            _exit(write(ends[1], &well, sizeof well) < 0);
        }
        _exit(read(ends[0], &well, sizeof well) == sizeof well ? well : 8);
    }
    printf("daemon %d\n", is_well(child));
    return 0;
}

// Children that begin without handlers (CLONE_CLEAR_SIGHAND) read absent pages. Since 2.38,
// children of glibc's `posix_spawn` borrow their parent's memory. Where `clone3` fails, glibc makes
// them by `clone`.
static void handle(int signal) { (void)signal, _exit(9); }
static int has_no_handlers(void) {
    int ignored = 0;
    for (int signal = 1; signal <= 31; signal++) {
        struct sigaction action = { .sa_handler = SIG_DFL };
        sigaction(signal, NULL, &action);
        if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN) return 0;
        ignored += action.sa_handler == SIG_IGN;
    }
    return ignored == 1;
}
static int work_cleared(void *at) {
    if (!has_no_handlers()) return 6;
    kill(getpid(), SIGWINCH);
    return run_child(at);
}
static int read_borrowed(void *at) {
    (void)at;
    for (long i = 0; i < 20 * MIB; i += PAGE)
        if (memory[i] != (unsigned char)(i >> 12)) return 2;
    return 0;
}
static pid_t clone_cleared(int flags, int (*work)(void *), unsigned char *stack) {
    unsigned long given[11] = { flags | 1UL << 32, 0, 0, 0, SIGCHLD, (unsigned long)stack, MIB };
#ifdef __x86_64__
    register void *at __asm__("r8") = memory + 5 * PAGE;
    long child = SYS_clone3;
    __asm__ volatile("syscall; test %%rax, %%rax; jnz 1f; mov %%r8, %%rdi; call *%%rdx;"
                     "mov %%eax, %%edi; mov $231, %%eax; syscall; 1:"
                     : "+a"(child) : "D"(given), "S"(sizeof given), "d"(work), "r"(at)
                     : "rcx", "r11", "memory");
#else
    register long number __asm__("x8") = SYS_clone3;
    register long child __asm__("x0") = (long)given;
    register long size __asm__("x1") = sizeof given;
    register void *at __asm__("x9") = memory + 5 * PAGE;
    __asm__ volatile("svc #0; cbnz x0, 1f; mov x0, x9; blr %2; mov x8, #94; svc #0; 1:"
                     : "+r"(child) : "r"(size), "r"(work), "r"(at), "r"(number)
                     : "x30", "memory");
#endif
    if (child == -ENOSYS) return clone(work, stack + MIB, flags | SIGCHLD, at);
    return child;
}
static int cleared(void) {
    memory = map(20 * MIB);
    for (long i = 0; i < 20 * MIB; i++) memory[i] = i >> 12;
    signal(SIGUSR2, SIG_IGN);
    int handled[] = { SIGUSR1, SIGBUS, SIGILL, SIGSEGV, SIGWINCH };
    for (int i = 0; i < 5; i++) signal(handled[i], handle);
    grow();
    send_out(memory, 20 * MIB);
    unsigned char *stack = map(MIB);
    printf("apart %d", is_well(clone_cleared(0, work_cleared, stack)));
    send_out(memory, 20 * MIB);
    int flags = CLONE_VM | CLONE_VFORK;
    printf(", borrowed %d", is_well(clone_cleared(flags, read_borrowed, stack)));
    struct sigaction action;
    sigaction(SIGBUS, NULL, &action);
    printf(", handled here %d\n", action.sa_handler == handle);
    return 0;
}

// Forks often while the process has more than half of its budget, but is not short of memory.
static int ahead(void) {
    int well = 0;
    memset(malloc(19 * MIB), 1, 19 * MIB);
    for (int i = 0; i < 200; i++) {
        pid_t child = fork();
        if (!child) _exit(0);
        well += is_well(child);
        usleep(1000);
    }
    printf("%d forks\n", well);
    grow();
    return 0;
}

// The process may open no more files (Landlock), and forks children that change their memory.
static int confined(void) {
    unsigned char *kept = map(16 * MIB);
    for (int i = 0; i < 16 * MIB; i++) kept[i] = i * 2654435761u >> 13;
    grow();
    unsigned long long every = (1 << 13) - 1;
    int rules = syscall(444, &every, sizeof every, 0);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (rules >= 0) syscall(446, rules, 0);
    printf("%d", rules >= 0 && open("/var/tmp", O_RDONLY | O_DIRECTORY) >= 0);
    fflush(stdout);
    for (int round = 0; round < 3; round++) {
        pid_t child = fork();
        if (!child) {
            send_out(kept, 16 * MIB);
            int wrong = 0;
            for (int i = round; i < 16 * MIB; i += 64)
                wrong += kept[i] != (unsigned char)(i * 2654435761u >> 13);
            memset(kept, round, 8 * MIB);
            send_out(kept, 16 * MIB);
            _exit(!!wrong + 2 * (kept[4 * MIB] != round));
        }
        int status = -1;
        printf(" %d", waitpid(child, &status, 0) == child ? status : errno);
    }
    int wrong = 0;
    for (int i = 0; i < 16 * MIB; i += 64)
        wrong += kept[i] != (unsigned char)(i * 2654435761u >> 13);
    printf(" %d\n", wrong);
    return 0;
}

// A handler of `fork` in the child, set before ours, starts a thread and uses memory.
static unsigned char *handed;
static void *sum_handed(void *sum) {
    for (int i = 0; i < 16 * MIB; i += PAGE) *(long *)sum += handed[i];
    return NULL;
}
static void use_memory(void) {
    if (!handed) return;
    pthread_t thread;
    long sum = 0;
    memset(malloc(8 * MIB), 1, 8 * MIB);
    pthread_create(&thread, NULL, sum_handed, &sum);
    pthread_join(thread, NULL);
    if (sum != 16 * MIB / PAGE * 3) _exit(5);
}
static int handles_in_child(void) {
    pthread_atfork(NULL, NULL, use_memory);
    unsigned char *kept = map(16 * MIB);
    memset(kept, 3, 16 * MIB);
    grow();
    handed = kept;
    for (int round = 0; round < 2; round++) {
        send_out(kept, 16 * MIB);
        pid_t child = fork();
        if (!child) {
            long sum = 0;
            send_out(kept, 16 * MIB);
            sum_handed(&sum);
            _exit(sum != 16 * MIB / PAGE * 3);
        }
        printf("%d ", is_well(child));
    }
    puts("");
    return 0;
}

// The program counts its threads by the kernel's list. Some programs refuse to fork with more than
// one thread.
static int threads_in(int processes) {
    struct stat status;
    int answer = fstatat(processes, "self/task/", &status, 0);
    return answer ? -1 : (int)status.st_nlink - 2;
}
static int threads_of(void) {
    int processes = open("/proc/", O_RDONLY | O_DIRECTORY);
    int count = threads_in(processes);
    close(processes);
    return count;
}
static void *count_threads(void *there) {
    *(int *)there = threads_of();
    return NULL;
}
// The same in a sandbox, where only a descriptor leads to /proc.
static int counts_in_sandbox(void) {
    int processes = open("/proc/", O_RDONLY | O_DIRECTORY);
    for (int i = 0; i < 16; i++) memset(map(MIB), 1, MIB);
    if (unshare(CLONE_NEWUSER) || chroot("/proc/self/fdinfo/")) return 2;
    printf("%d", threads_in(processes));
    for (int i = 0; i < 60; i++, usleep(4000)) memset(map(MIB), 1, MIB);
    printf(" %d\n", threads_in(processes));
    return 0;
}
static int counts_itself(void) {
    int two = 0;
    for (int i = 0; i < 16; i++) memset(map(MIB), 1, MIB);
    printf("%d", threads_of());
    grow();
    printf(" %d", threads_of());
    fflush(stdout);
    pid_t child = fork();
    if (!child) _exit(threads_of() != 1);
    pthread_t thread;
    pthread_create(&thread, NULL, count_threads, &two);
    pthread_join(thread, NULL);
    printf(" %d %d\n", is_well(child), two);
    return 0;
}

// Threads made without the C library, and processes in the same memory. Each has its parent's
// thread-local variables.
enum { LENT = 8 * MIB };
static unsigned char *lent;
static volatile int sharing;
static unsigned long sum_lent(void) {
    unsigned long sum = 0;
    for (int turn = 0; turn < 50; turn++)
        for (long at = 0; at < LENT; at += PAGE)
            sum = sum * 31 + lent[at + 8] + lent[at + 100]++;
    return sum;
}
static volatile unsigned long lent_sum;
static volatile int may_sum;
static int sum_and_end(void *is_thread) {
    sharing = 1;
    while (!may_sum) sched_yield();
    lent_sum = sum_lent();
    sharing = 0;
    // This thread may call no function of the C library, since it has another thread's variables.
    return is_thread ? (int)syscall(SYS_exit, 0) : 7;
}
static int share_with(int flags, int grows_before) {
    lent = map(LENT);
    for (long at = 0; at < LENT; at++) lent[at] = at % 251;
    if (grows_before) grow();
    may_sum = grows_before;
    end_after(100);
    int is_thread = (flags & CLONE_THREAD) != 0, status = 0;
    pid_t child = clone(sum_and_end, map(MIB) + MIB, flags, is_thread ? lent : NULL);
    while (!sharing && !lent_sum) usleep(1000);
    for (int i = 0; !grows_before && i < 60; i++) {
        memset(map(MIB), i + 1, MIB);
        usleep(70000);
    }
    may_sum = 1;
    unsigned char *own = map(LENT);
    unsigned long sum = 0;
    for (long at = 0; at < LENT; at++) own[at] = at % 241;
    for (int turn = 0; turn < 50; turn++)
        for (long at = 0; at < LENT; at += PAGE) sum = sum * 31 + own[at + 8]++;
    if (!is_thread) waitpid(child, &status, 0);
    while (!lent_sum || sharing) usleep(1000);
    printf("%lx, %lx, %d\n", sum, lent_sum, WEXITSTATUS(status));
    return 0;
}
enum { ALL = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND };
static int shares_memory(void) { return share_with(CLONE_VM | SIGCHLD, 1); }
static int shares_all(void) { return share_with(ALL | SIGCHLD, 1); }
static int shares_as_thread(void) { return share_with(ALL | CLONE_THREAD, 1); }
static int shared_memory_before(void) { return share_with(CLONE_VM | SIGCHLD, 0); }
static int shared_as_thread_before(void) { return share_with(ALL | CLONE_THREAD, 0); }

// The register that points to thread-local variables has another value for a while.
#ifdef __x86_64__
static int other_block(void) {
    static unsigned long block[2 * PAGE];
    unsigned long own, sum = 0;
    lent = map(LENT);
    for (long at = 0; at < LENT; at++) lent[at] = at % 251;
    grow();
    send_out(lent, LENT);
    syscall(SYS_arch_prctl, 0x1003, &own);
    syscall(SYS_arch_prctl, 0x1002, block + PAGE);
    for (long at = 0; at < LENT; at += PAGE) sum = sum * 31 + lent[at + 8];
    // This does without the C library, whose errno is among these variables.
    long number = SYS_arch_prctl;
    number = own_call(number, 0x1002, own, 0, 0, 0, 0);
    printf("%lx, %ld\n", sum, number);
    return 0;
}
#else
// A thread of aarch64 sets it without a call, and its first bytes are the program's.
static int other_block(void) { grow(); return 0; }
#endif

// Our threads must not have a stack where the program might map memory, also in a child.
static int stacks_between(void) {
    char name[300], line[300];
    int between = 0;
    DIR *threads = opendir("/proc/self/task");
    for (struct dirent *one; (one = readdir(threads));) {
        if (one->d_name[0] == '.' || atoi(one->d_name) == getpid()) continue;
        snprintf(name, sizeof name, "/proc/self/task/%s/syscall", one->d_name);
        FILE *file = fopen(name, "r");
        unsigned long stack;
        // The number of the call, its six arguments, and the stack pointer. A running thread has no
        // such line.
        const char *form = "%*s %*s %*s %*s %*s %*s %*s %lx";
        if (file && fgets(line, sizeof line, file) && sscanf(line, form, &stack) == 1)
            between += stack < 1UL << 46 || stack >= 5UL << 44;
        if (file) fclose(file);
    }
    closedir(threads);
    return between;
}
static int stacks(void) {
    grow();
    pid_t child = fork();
    if (!child) _exit(stacks_between());
    int status = -1;
    waitpid(child, &status, 0);
    printf("child %d, here %d\n", status, stacks_between());
    return 0;
}

// A child may have no thread: a handler of the program's, which runs before ours, has set that
// limit.
static void allow_no_threads(void) {
    struct rlimit none = { 0, 0 };
    setrlimit(RLIMIT_NPROC, &none);
}
static int wrong_in(const unsigned char *memory, size_t bytes, int value) {
    int wrong = 0;
    for (size_t i = 0; i < bytes; i += 512) wrong += memory[i] != value;
    return wrong;
}
static int no_threads(void) {
    unsigned char *memory = map(16 * MIB);
    int status = -1;
    memset(memory, 7, 16 * MIB);
    pthread_atfork(NULL, NULL, allow_no_threads);
    grow();
    send_out(memory, 16 * MIB);
    pid_t child = fork();
    if (!child) {
        unsigned char *more = map(20 * MIB);
        memset(more, 3, 20 * MIB);
        _exit(wrong_in(memory, 16 * MIB, 7) + wrong_in(more, 20 * MIB, 3) != 0);
    }
    waitpid(child, &status, 0);
    printf("%d, %d wrong\n", status, wrong_in(memory, 16 * MIB, 7));
    return 0;
}

// The first thread ends; another thread continues.
static unsigned char *kept;
static void *goes_on(void *when) {
    char said[8] = "";
    int status = -1;
    usleep(200000);
    if (when) grow();
    pid_t child = fork();
    if (!child) _exit(wrong_in(kept, 16 * MIB, 7) != 0);
    waitpid(child, &status, 0);
    send_out(kept, 16 * MIB);
    FILE *echo = popen("echo said", "r");
    if (!echo || !fgets(said, sizeof said, echo)) exit(5);
    printf("%d, %d wrong, %s", status, wrong_in(kept, 16 * MIB, 7), said);
    exit(0);
}
static int first_ends(int is_early) {
    pthread_t other;
    kept = map(16 * MIB);
    memset(kept, 7, 16 * MIB);
    if (!is_early) grow();
    end_after(60);
    pthread_create(&other, NULL, goes_on, is_early ? kept : NULL);
    pthread_exit(NULL);
}
static int first_ends_early(void) { return first_ends(1); }
static int first_ends_late(void) { return first_ends(0); }

// Threads with their own table of descriptors, and a process with its own, while forks change our
// table.
static void fill(unsigned char *memory, size_t bytes) {
    static unsigned long state = 88172645463325252;
    for (size_t i = 0; i < bytes; i += 8) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        memcpy(memory + i, &state, 8);
    }
}
static unsigned long sum_of(const unsigned char *memory, size_t bytes) {
    unsigned long sum = 0, word;
    for (size_t i = 0; i < bytes; i += 8) {
        memcpy(&word, memory + i, 8);
        sum = sum * 31 + word;
    }
    return sum;
}
enum { FILLED = 36 * MIB };
static unsigned char *filled;
static unsigned long expected;
static void fork_and_fill(void) {
    for (int i = 0; i < 2; i++) {
        int status = -1;
        pid_t child = fork();
        if (!child) {
            syscall(SYS_close_range, 3L, ~0U, 2L);
            int is_same = sum_of(filled, FILLED) == expected;
            fill(filled, FILLED);
            expected = sum_of(filled, FILLED);
            if (!fork()) _exit(sum_of(filled, FILLED) != expected);
            wait(&status);
            fill(filled, FILLED / 2);
            _exit(!is_same + 2 * (status != 0));
        }
        waitpid(child, &status, 0);
        printf("%d\n", status);
        fill(filled, FILLED);
        expected = sum_of(filled, FILLED);
    }
}
static pthread_barrier_t turns;
static void *with_own_descriptors(void *none) {
    printf("%d\n", unshare(CLONE_FILES));
    pthread_barrier_wait(&turns);
    pthread_barrier_wait(&turns);
    printf("%d\n", sum_of(filled, FILLED) == expected);
    return none;
}
static int own_descriptors(void) {
    filled = map(FILLED);
    grow();
    fill(filled, FILLED);
    expected = sum_of(filled, FILLED);
    end_after(100);
    fork_and_fill();
    printf("%ld\n", syscall(SYS_close_range, 3L, ~0U, 2L));
    fork_and_fill();
    printf("%d\n", sum_of(filled, FILLED) == expected);
    return 0;
}
static int threads_descriptors(void) {
    pthread_t other;
    filled = map(FILLED);
    grow();
    end_after(100);
    pthread_barrier_init(&turns, NULL, 2);
    pthread_create(&other, NULL, with_own_descriptors, NULL);
    pthread_barrier_wait(&turns);
    fill(filled, FILLED);
    expected = sum_of(filled, FILLED);
    fork_and_fill();
    pthread_barrier_wait(&turns);
    pthread_join(other, NULL);
    printf("%d\n", sum_of(filled, FILLED) == expected);
    return 0;
}
static int own_descriptors_before(void) {
    pthread_t other;
    filled = map(FILLED);
    pthread_barrier_init(&turns, NULL, 2);
    pthread_create(&other, NULL, with_own_descriptors, NULL);
    pthread_barrier_wait(&turns);
    fill(filled, FILLED);
    expected = sum_of(filled, FILLED);
    grow();
    pthread_barrier_wait(&turns);
    pthread_join(other, NULL);
    return 0;
}

// Forks while another thread waits in a call, whose pages may leave in the child, and by a handler
// that has interrupted a call, whose pages stay.
static int theirs[2], ours[2];
static unsigned char *read_into[2];
static int child_sends_out(unsigned char *at) {
    int status;
    pid_t child = fork();
    if (child == 0) _exit(send_out(at, PAGE));
    waitpid(child, &status, 0);
    return status;
}
static void *waits_in_call(void *unused) {
    if (read(theirs[0], read_into[0], 2 * PAGE) != PAGE) abort();
    return unused;
}
static void fork_in_call(int signal) {
    printf("%x\n", child_sends_out(read_into[1]));
    if (write(ours[1], read_into[0], PAGE) != PAGE) abort();
    (void)signal;
}
static int waiting_calls(void) {
    pthread_t other;
    struct sigaction action = { .sa_handler = fork_in_call, .sa_flags = SA_RESTART };
    struct itimerval soon = { .it_value = { .tv_usec = 200000 } };
    int is_watched = getenv("UZSWAP_TREE") != NULL;
    if (pipe(theirs) || pipe(ours)) abort();
    for (int i = 0; i < 2; i++) memset(read_into[i] = map(2 * PAGE), i + 1, 2 * PAGE);
    grow();
    pthread_create(&other, NULL, waits_in_call, NULL);
    usleep(200000);
    // Without uzswap the kernel has no place to which it could page that memory out.
    printf("%d\n", child_sends_out(read_into[0]) == is_watched << 8);
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &soon, NULL);
    if (read(ours[0], read_into[1], 2 * PAGE) != PAGE) abort();
    if (write(theirs[1], read_into[1], PAGE) != PAGE) abort();
    pthread_join(other, NULL);
    printf("%d %d\n", read_into[0][PAGE - 1], read_into[1][PAGE]);
    return 0;
}

// Long arguments of a program, while other threads need all memory.
enum { ARGUMENTS = 15, ARGUMENT_BYTES = 128 << 10 };
static volatile int is_over;
static void *touches(void *at) {
    unsigned char *memory = at;
    for (unsigned state = (long)at / PAGE; !is_over;) {
        state = state * 1103515245 + 12345;
        memory[(state >> 3) % (40 * MIB)]++;
    }
    return NULL;
}
static int long_arguments(void) {
    static char *list[ARGUMENTS + 1] = { "true" };
    extern char **environ;
    unsigned char *memory = map(40 * MIB);
    pthread_t threads[3];
    int failed = 0, status;
    for (int i = 1; i < ARGUMENTS; i++) {
        list[i] = (char *)map(ARGUMENT_BYTES);
        memset(list[i], 'a', ARGUMENT_BYTES - 1);
    }
    memset(memory, 1, 40 * MIB);
    grow();
    end_after(100);
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, touches, memory);
    for (int turn = 0; turn < 6; turn++) {
        pid_t child;
        for (int i = 1; i < ARGUMENTS; i++) send_out(list[i], ARGUMENT_BYTES);
        failed += posix_spawn(&child, "/bin/true", NULL, NULL, list, environ) != 0;
        if (waitpid(child, &status, 0) > 0) failed += status != 0;
    }
    is_over = 1;
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    // All memory that was pinned for the children may leave now.
    for (int i = 1; i < ARGUMENTS; i++) failed += !send_out(list[i], ARGUMENT_BYTES);
    printf("%d failed\n", getenv("UZSWAP_TREE") ? failed : 0);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "locked", locked }, { "locked_and_short", locked_and_short }, { "stopped", stopped },
        { "ways", ways }, { "traces", traces }, { "ahead", ahead }, { "confined", confined },
        { "stacks", stacks }, { "cleared", cleared }, { "no_threads", no_threads },
        { "first_ends_early", first_ends_early }, { "first_ends_late", first_ends_late },
        { "own_descriptors", own_descriptors }, { "threads_descriptors", threads_descriptors },
        { "own_descriptors_before", own_descriptors_before },
        { "waiting_calls", waiting_calls }, { "long_arguments", long_arguments },
        { "counts_itself", counts_itself }, { "counts_in_sandbox", counts_in_sandbox },
        { "handles_in_child", handles_in_child },
        { "shares_memory", shares_memory }, { "shares_all", shares_all },
        { "shares_as_thread", shares_as_thread }, { "other_block", other_block },
        { "shared_memory_before", shared_memory_before },
        { "shared_as_thread_before", shared_as_thread_before },
    };
    return choose(all, sizeof all / sizeof *all, arguments > 1 ? argument[1] : "");
}
