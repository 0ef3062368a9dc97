// Handlers of signals: their stacks, the state that they see, and the ways to leave them.
#include "habit.h"
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <alloca.h>
#include <dlfcn.h>
#include <ucontext.h>

static volatile int count;
static sigjmp_buf back;

static void set(int signal, int flags, void *handler) {
    struct sigaction action = { .sa_flags = flags };
    action.sa_sigaction = (void (*)(int, siginfo_t *, void *))handler;
    sigaction(signal, &action, NULL);
}

static void *stack_for_signals(size_t bytes) {
    void *at = map(bytes);
    stack_t stack = { .ss_sp = at, .ss_size = bytes };
    if (sigaltstack(&stack, NULL)) abort();
    return at;
}

// Handlers with large frames, for each signal that uzswap may use.
static void __attribute__((noinline)) use(volatile char *frame, int bytes) {
    for (int i = 0; i < bytes; i += 64) frame[i] = i;
    count++;
}
static void take_much(int signal) {
    char frame[400000];
    use(frame, sizeof frame);
    (void)signal;
}
static int large_frames(void) {
    int all[] = { SIGUSR1, SIGBUS, SIGSEGV, SIGILL, SIGRTMIN + 3 };
    for (int i = 0; i < 5; i++) set(all[i], i % 2 ? SA_ONSTACK : 0, take_much);
    unsigned char *memory = map(8 * MIB);
    memset(memory, 7, 8 * MIB);
    grow();
    long sum = 0;
    for (int i = 0; i < 5; i++) {
        send_out(memory, 8 * MIB);
        raise(all[i]);
        for (long at = 0; at < 8 * MIB; at += PAGE) sum += memory[at];
    }
    printf("%d handlers, %ld\n", count, sum);
    return 0;
}

// A handler that notes the address of its frame.
static volatile long place;
static void say_place(int signal) {
    char here;
    place = (long)&here;
    count += signal != 0;
}
static int places(void) {
    char here, *stack = stack_for_signals(65536);
    set(SIGUSR1, SA_ONSTACK, say_place);
    set(SIGUSR2, 0, say_place);
    grow();
    send_out(stack, 65536);
    raise(SIGUSR1);
    int is_on_it = place > (long)stack && place < (long)stack + 65536;
    raise(SIGUSR2);
    int is_near = labs(place - (long)&here) < 65536;
    stack_t now, small = { .ss_sp = stack, .ss_size = 100 }, none = { .ss_flags = SS_DISABLE };
    sigaltstack(NULL, &now);
    int refused = sigaltstack(&small, NULL) == -1 && errno == ENOMEM;
    int bad = sigaltstack((void *)8, NULL) == -1 && errno == EFAULT;
    sigaltstack(&none, NULL);
    raise(SIGUSR1);
    int is_near_too = labs(place - (long)&here) < 65536;
    printf("%d %d %d, %d %d, %d %d\n", is_on_it, is_near, is_near_too, refused, bad,
           now.ss_sp == stack && now.ss_size == 65536 && now.ss_flags == 0, count);
    return 0;
}

// Sets the alternate stack early, without the C library.
static int early_stack(void) {
    unsigned char *stack = map(65536), *memory = map(MIB);
    stack_t given = { .ss_sp = stack, .ss_size = 65536 }, now;
    long answer = own_call(SYS_sigaltstack, (long)&given, 0, 0, 0, 0, 0);
    set(SIGUSR1, SA_ONSTACK, say_place);
    memset(memory, 3, MIB);
    grow();
    send_out(stack, 65536);
    send_out(memory, PAGE);
    int byte = memory[5];
    raise(SIGUSR1);
    sigaltstack(NULL, &now);
    printf("%ld %d %d %d\n", answer, byte, place > (long)stack && place < (long)stack + 65536,
           now.ss_sp == stack);
    return 0;
}

// A stack of zeros is too small, but at the start it is the present stack of a first thread. A call
// that fails writes nothing.
static void *zero_stacks(void *unused) {
    stack_t zeros = { 0 }, none = { .ss_flags = SS_DISABLE }, now = { .ss_flags = 77 };
    int first = sigaltstack(&zeros, &now);
    sigaltstack(&none, NULL);
    printf("%d %d, %d\n", first, now.ss_flags, sigaltstack(&zeros, NULL));
    return unused;
}
static int no_stack(void) {
    pthread_t thread;
    grow();
    zero_stacks(NULL);
    pthread_create(&thread, NULL, zero_stacks, NULL);
    pthread_join(thread, NULL);
    return 0;
}

// Catches endless recursion, again and again.
static int __attribute__((noinline)) deep(int depth) {
    volatile char frame[2048];
    frame[0] = depth;
    return deep(depth + 1) + frame[0];
}
static void jump(int signal) { siglongjmp(back, signal); }
static int overflows(void) {
    stack_for_signals(65536);
    set(SIGSEGV, SA_ONSTACK | SA_NODEFER, jump);
    grow();
    for (count = 0; count < 5;)
        if (!sigsetjmp(back, 1)) deep(0);
        else count++;
    stack_t now;
    sigaltstack(NULL, &now);
    printf("%d overflows, %d\n", count, now.ss_flags);
    return 0;
}

// A thread computes on a stack from `malloc`. The pages below its frame are out.
static ucontext_t hub, other;
static unsigned char *coroutine;
static volatile long lowest;
static void compute(void) {
    long page = (long)__builtin_frame_address(0) & -(long)PAGE;
    volatile char *end = alloca((long)__builtin_frame_address(0) - page + PAGE - 600);
    end[0] = 1;
    lowest = page - PAGE;
    while (!count);
    swapcontext(&other, &hub);
}
static void *interrupt(void *thread) {
    while (!lowest) usleep(1000);
    usleep(50000);
    send_out(coroutine, lowest - (long)coroutine);
    pthread_kill((pthread_t)thread, SIGUSR1);
    return NULL;
}
static int coroutines(void) {
    pthread_t thread;
    coroutine = (unsigned char *)(((long)malloc(65 * PAGE) + PAGE) & -(long)PAGE);
    memset(coroutine, 1, 64 * PAGE);
    set(SIGUSR1, 0, say_place);
    grow();
    getcontext(&other);
    other.uc_stack.ss_sp = coroutine;
    other.uc_stack.ss_size = 64 * PAGE;
    makecontext(&other, compute, 0);
    pthread_create(&thread, NULL, interrupt, (void *)pthread_self());
    swapcontext(&hub, &other);
    pthread_join(thread, NULL);
    printf("%d on it: %d\n", count, place < lowest + PAGE && place > (long)coroutine);
    return 0;
}

// A handler blocks all signals in the context to which it returns.
static void block_all(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    sigfillset(&((ucontext_t *)context)->uc_sigmask);
}
static int masks(void) {
    unsigned char *memory = map(MIB);
    memset(memory, 1, MIB);
    set(SIGUSR1, SA_SIGINFO, block_all);
    set(SIGUSR2, 0, say_place);
    grow();
    send_out(memory, MIB);
    raise(SIGUSR1);
    raise(SIGUSR2);
    int byte = memory[0], while_blocked = count;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    printf("%d, %d then %d\n", byte, while_blocked, count);
    return 0;
}

// A handler jumps out of `read`, whose buffer is out each time.
static int jumps_out_of_read(void) {
    unsigned char *memory = map(64 * MIB);
    int ends[2];
    memset(memory, 1, 64 * MIB);
    if (pipe(ends)) return 2;
    grow();
    set(SIGALRM, 0, jump);
    for (volatile int i = 0; i < 64; i++)
        if (!sigsetjmp(back, 1)) {
            struct itimerval soon = { .it_value = { 0, 15000 } };
            setitimer(ITIMER_REAL, &soon, NULL);
            // A short and a long buffer, which are treated differently.
            if (read(ends[0], memory + i * (long)MIB, i % 2 ? MIB : 30000) > 0) return 3;
        }
    long sum = 0;
    for (int turn = 0; turn < 2; turn++)
        for (long at = 0; at < 64 * MIB; at += PAGE) sum += memory[at];
    printf("%ld\n", sum);
    return 0;
}

// Cancels a thread that waits in a call.
static unsigned char *buffer;
static int ends[2];
static char ran[64];
static void leave_scope(int *unused) { (void)unused, strcat(ran, " scope"); }
static void clean_up(void *unused) { (void)unused, strcat(ran, " handler"); }
static void *wait_in_read(void *bytes) {
    __attribute__((cleanup(leave_scope))) int scope = 0;
    pthread_cleanup_push(clean_up, &scope);
    if (read(ends[0], buffer, (long)bytes) > 0) strcat(ran, " data");
    pthread_cleanup_pop(0);
    return NULL;
}
static void *wait_in_pause(void *unused) {
    __attribute__((cleanup(leave_scope))) int scope = 0;
    pthread_cleanup_push(clean_up, unused);
    pause();
    pthread_cleanup_pop(scope);
    return NULL;
}
static int cancels(void) {
    if (pipe(ends)) return 2;
    buffer = map(MIB);
    memset(buffer, 1, MIB);
    grow();
    end_after(20);
    for (int i = 0; i < 3; i++) {
        pthread_t thread;
        void *answer;
        send_out(buffer, MIB);
        ran[0] = 0;
        pthread_create(&thread, NULL, i < 2 ? wait_in_read : wait_in_pause,
                       (void *)(i ? 100L : 500000L));
        usleep(300000);
        pthread_cancel(thread);
        pthread_join(thread, &answer);
        printf("%d%s\n", answer == PTHREAD_CANCELED, ran);
    }
    return 0;
}

// Cancels threads while their pages are paged in and out. The threads permit cancellation at any
// time.
static void *touch_for_ever(void *memory) {
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    for (;;)
        for (long at = 0; at < 8 * MIB; at += PAGE) ((volatile unsigned char *)memory)[at]++;
}
static int cancels_anywhere(void) {
    unsigned char *memory = map(8 * MIB);
    int cancelled = 0;
    memset(memory, 1, 8 * MIB);
    grow();
    end_after(60);
    for (int i = 0; i < 40; i++) {
        pthread_t thread;
        void *answer;
        pthread_create(&thread, NULL, touch_for_ever, memory);
        usleep(5000);
        send_out(memory, 8 * MIB);
        pthread_cancel(thread);
        pthread_join(thread, &answer);
        cancelled += answer == PTHREAD_CANCELED;
    }
    printf("%d cancelled\n", cancelled);
    return 0;
}

// A handler sees the interrupted address. If the program waits in a call, that is the address of
// the call.
static volatile long at;
static void tell(int signal, siginfo_t *info, void *context) {
    (void)info;
    at = NEXT_OF(context);
    count += signal != 0;
}
static long beginning_of(void *function) { return (long)function; }
static void *signal_soon(void *thread) {
    usleep(200000);
    pthread_kill((pthread_t)thread, SIGUSR1);
    usleep(100000);
    return (void *)(long)write(ends[1], "x", 1);
}
static int tells_where(void) {
    if (pipe(ends)) return 2;
    set(SIGUSR1, SA_SIGINFO | SA_RESTART, tell);
    grow();
    pthread_t thread;
    char byte = 0;
    pthread_create(&thread, NULL, signal_soon, (void *)pthread_self());
    long bytes = read(ends[0], &byte, 1);
    pthread_join(thread, NULL);
    printf("%ld %c %d, in read: %d\n", bytes, byte, count,
           labs(at - beginning_of((void *)read)) < 256);
    return 0;
}

// A thread with the smallest possible stack.
static int file;
static void *read_and_say(void *unused) {
    long sum = (long)unused;
    for (int i = 0; i < 200; i++) sum += pread(file, buffer + i * PAGE, 5, 0);
    printf("%ld bytes\n", sum);
    return NULL;
}
static int small_stacks(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    buffer = map(MIB);
    memset(buffer, 1, MIB);
    file = open("/etc/passwd", O_RDONLY);
    grow();
    send_out(buffer, MIB);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN);
    if (pthread_create(&thread, &attributes, read_and_say, NULL)) return 3;
    return pthread_join(thread, NULL);
}

// A thread with the smallest stack, and with thread-local variables on that stack, waits during the
// takeover.
static __thread volatile char variables[1500];
static void *wait_and_say(void *unused) {
    char byte = 0;
    long bytes = read(ends[0], &byte, 1);
    variables[7] = byte;
    printf("%ld %c\n", bytes, variables[7]);
    return unused;
}
static int small_stack_waits(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    if (pipe(ends)) return 2;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN);
    if (pthread_create(&thread, &attributes, wait_and_say, NULL)) return 3;
    grow();
    if (write(ends[1], "x", 1) != 1) return 4;
    return pthread_join(thread, NULL);
}

// A library that finds functions in the C library itself, like one that is loaded with
// RTLD_DEEPBIND.
static int past_other_libraries(void) {
    int (*action)(int, const struct sigaction *, struct sigaction *) =
        dlsym(dlopen("libc.so.6", RTLD_NOW), "sigaction");
    unsigned char *memory = map(8 * MIB);
    memset(memory, 7, 8 * MIB);
    grow();
    struct sigaction ours = { .sa_handler = say_place, .sa_flags = SA_NODEFER }, before, now;
    int all[] = { SIGBUS, SIGILL, SIGSEGV, SIGUSR1 }, right = 0;
    long sum = 0;
    for (int i = 0; i < 4; i++) {
        action(all[i], &ours, &before);
        send_out(memory, 8 * MIB);
        raise(all[i]);
        for (long at = 0; at < 8 * MIB; at += PAGE) sum += memory[at];
        action(all[i], &before, &now);
        right += now.sa_handler == say_place && now.sa_flags & SA_NODEFER;
        right += before.sa_handler == SIG_DFL;
    }
    printf("%d signals, %d right, %ld\n", count, right, sum);
    return 0;
}

// No signal can be queued: the test runs the program with `ulimit -i 0`.
static int nothing_queued(void) {
    grow();
    puts("done");
    return 0;
}

// Many threads with the smallest stack, which begin and end at the same time.
static void *sum_buffer(void *from) {
    char part[2000];
    memcpy(part, buffer + (long)from * PAGE, sizeof part);
    return (void *)(long)part[1999];
}
static int many_small_stacks(void) {
    enum { AT_ONCE = 60 };
    pthread_t threads[AT_ONCE];
    pthread_attr_t attributes;
    buffer = map(MIB);
    memset(buffer, 1, MIB);
    grow();
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN);
    long sum = 0;
    for (int round = 0; round < 10; round++) {
        send_out(buffer, MIB);
        for (long i = 0; i < AT_ONCE; i++)
            if (pthread_create(&threads[i], &attributes, sum_buffer, (void *)i)) return 3;
        for (int i = 0; i < AT_ONCE; i++) {
            void *one = NULL;
            pthread_join(threads[i], &one);
            sum += (long)one;
        }
    }
    printf("%ld\n", sum);
    return 0;
}

// The C library's thread for timers waits for a signal of that library.
static volatile int rings;
static unsigned char *rung_for;
static void ring(union sigval turn) {
    send_out(rung_for, MIB);
    __atomic_add_fetch(&rings, rung_for[turn.sival_int] == 7, __ATOMIC_SEQ_CST);
}
static int rings_in_threads(void) {
    rung_for = map(MIB);
    memset(rung_for, 7, MIB);
    struct sigevent event = { .sigev_notify = SIGEV_THREAD, .sigev_notify_function = ring };
    event.sigev_value.sival_int = 5 * PAGE;
    timer_t timer;
    grow();
    if (timer_create(CLOCK_MONOTONIC, &event, &timer)) abort();
    struct itimerspec often = { { 0, 10000000 }, { 0, 1000000 } };
    timer_settime(timer, 0, &often, NULL);
    for (int i = 0; i < 1000 && rings < 8; i++) usleep(10000);
    printf("%d\n", rings >= 8);
    fflush(stdout);
    _exit(0);
}

// A handler leaves a waiting call for another stack. Calls on that stack send the waiting call's
// memory out.
static ucontext_t begins, waits, goes_on;
static unsigned char *awaited;
static int is_waiting, way, wire[2];
static long answer;
static void switches(int signal) {
    (void)signal;
    if (__sync_bool_compare_and_swap(&is_waiting, 1, 0)) swapcontext(&waits, &goes_on);
}
static void waits_there(void) {
    struct iovec part = { awaited, 100 };
    is_waiting = 1;
    answer = way == 0 ? read(wire[0], awaited, 100)
        : way == 1 ? read(wire[0], awaited, MIB / 2)
        : way == 2 ? readv(wire[0], &part, 1)
                   : recv(wire[0], awaited, 100, 0);
    is_waiting = 0;
    swapcontext(&waits, &begins);
}
static void goes_on_there(void) {
    unsigned char is_there;
    for (int i = 0; i < 3; i++) send_out(awaited, MIB);
    mincore(awaited, PAGE, &is_there);
    if (write(wire[1], "hello", 6) != 6) abort();
    swapcontext(&goes_on, &waits);
}
static int preempted(void) {
    unsigned char *stacks = map(8 * MIB);
    grow();
    end_after(30);
    set(SIGUSR2, SA_RESTART, switches);
    for (way = 0; way < 4; way++) {
        awaited = map(MIB);
        memset(awaited, 7, MIB);
        if (way < 3 ? pipe(wire) : socketpair(AF_UNIX, SOCK_STREAM, 0, wire)) abort();
        getcontext(&waits);
        getcontext(&goes_on);
        waits.uc_stack = (stack_t){ .ss_sp = stacks, .ss_size = MIB };
        goes_on.uc_stack = (stack_t){ .ss_sp = stacks + 4 * MIB, .ss_size = MIB };
        makecontext(&waits, waits_there, 0);
        makecontext(&goes_on, goes_on_there, 0);
        timer_t timer;
        struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2 };
        struct itimerspec when = { .it_value = { 0, 100000000 } };
        if (timer_create(CLOCK_MONOTONIC, &event, &timer)) abort();
        timer_settime(timer, 0, &when, NULL);
        swapcontext(&begins, &waits);
        printf("%ld %.6s\n", answer, answer > 0 ? (char *)awaited : "");
    }
    return 0;
}

// The program ignores a signal that uzswap uses, and another process sends it.
static int ignored(void) {
    grow();
    for (int signal_of = 0; signal_of < 2; signal_of++) {
        int one = signal_of ? SIGILL : SIGBUS, status = -1;
        pid_t child = fork();
        if (!child) {
            signal(one, SIG_IGN);
            raise(one);
            kill(getpid(), one);
            _exit(4);
        }
        waitpid(child, &status, 0);
        printf("%x\n", status);
    }
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "large_frames", large_frames }, { "places", places }, { "early_stack", early_stack },
        { "no_stack", no_stack },
        { "overflows", overflows }, { "coroutines", coroutines }, { "masks", masks },
        { "jumps_out_of_read", jumps_out_of_read }, { "cancels", cancels }, { "cancels_anywhere", cancels_anywhere },
        { "tells_where", tells_where }, { "small_stacks", small_stacks },
        { "small_stack_waits", small_stack_waits },
        { "nothing_queued", nothing_queued }, { "past_other_libraries", past_other_libraries },
        { "preempted", preempted }, { "ignored", ignored },
        { "rings_in_threads", rings_in_threads }, { "many_small_stacks", many_small_stacks },
    };
    return choose(all, sizeof all / sizeof *all, arguments > 1 ? argument[1] : "");
}
