/* Signals: handlers, their stacks, masks, and jumps out of handlers. */
#include "history.h"
#include <alloca.h>
#include <stdio.h>
#include <sys/signalfd.h>
#include <sys/time.h>
#include <ucontext.h>

enum { SIGNALS = 65, FRAME = 300000 };
enum { PLAIN, LARGE, MASKING, JUMPING, WHERE };

static struct {
    const struct operation *operation;
    long kind;
} handled[SIGNALS];
static __thread sigjmp_buf *landing;
static stack_t own_stack;

sigjmp_buf *land_at(sigjmp_buf *now) {
    sigjmp_buf *before = landing;
    landing = now;
    return before;
}

/* Uses a frame of 300 KB. */
static __attribute__((noinline)) uint64_t use_much_stack(uint64_t seed) {
    volatile char frame[FRAME];
    for (long at = 0; at < FRAME; at += 512) frame[at] = seed + at / 512;
    uint64_t sum = 1;
    for (long at = 0; at < FRAME; at += 512) sum = mix(sum, frame[at]);
    return sum;
}

static void on_signal(int number, siginfo_t *info, void *context) {
    int error = errno;
    const struct operation *operation = handled[number].operation;
    ucontext_t *interrupted = context;
    char *here = (char *)&interrupted;
    switch (handled[number].kind) {
    case LARGE: say(operation, number, use_much_stack(number)); break;
    case MASKING: sigaddset(&interrupted->uc_sigmask, SIGUSR2); break;
    case WHERE:
        say(operation, here > (char *)own_stack.ss_sp && here < (char *)own_stack.ss_sp + own_stack.ss_size, interrupted->uc_stack.ss_size);
        break;
    default: break;
    }
    if (info->si_code == SI_QUEUE) say(operation, info->si_value.sival_int, 0);
    run_block(operation);
    errno = error;
    if (handled[number].kind == JUMPING && landing) siglongjmp(*landing, 1);
}

/* handle SIGNAL FLAGS KIND: sets a handler that performs the block. */
static void op_handle(const struct operation *operation) {
    long number = operation->argument[0] % SIGNALS;
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = operation->argument[1] | SA_SIGINFO}, before;
    handled[number].operation = operation;
    handled[number].kind = operation->argument[2];
    long answer = sigaction(number, &action, &before);
    say(operation, answer, (before.sa_flags & ~0x04000000) + 1);
}

/* ignore SIGNAL, default SIGNAL */
static void op_ignore(const struct operation *operation) {
    say(operation, signal(operation->argument[0], SIG_IGN) == SIG_ERR ? -1 : 0, 0);
}
static void op_default(const struct operation *operation) {
    say(operation, signal(operation->argument[0], SIG_DFL) == SIG_ERR ? -1 : 0, 0);
}

/* raise SIGNAL HOW: raises the signal. A jumping handler lands here. */
static void op_raise(const struct operation *operation) {
    int number = operation->argument[0];
    sigjmp_buf here, *before = land_at(&here);
    union sigval value = {.sival_int = 77};
    volatile long answer = -1;
    if (sigsetjmp(here, 1))
        say_text(operation, "landed");
    else {
        switch (operation->argument[1]) {
        case 0: answer = raise(number); break;
        case 1: answer = kill(getpid(), number); break;
        case 2: answer = syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), number); break;
        default: answer = sigqueue(getpid(), number, value);
        }
        say(operation, answer, 0);
    }
    land_at(before);
}

/* stack KIND KIB: sets the alternate stack, by libc or (1) a raw call, in static or (2) mapped memory; 0 KIB: none. */
static void op_stack(const struct operation *operation) {
    static char memory[1 << 20] __attribute__((aligned(64)));
    long kind = operation->argument[0], bytes = operation->argument[1] << 10;
    stack_t now = {.ss_sp = memory, .ss_size = bytes, .ss_flags = bytes ? 0 : SS_DISABLE}, before = {0};
    if (bytes && kind & 2) now.ss_sp = map(bytes);
    long answer = kind & 1 ? syscall(SYS_sigaltstack, &now, &before) : sigaltstack(&now, &before);
    if (!answer) own_stack = now;
    say(operation, answer, mix(before.ss_flags + 1, before.ss_flags & SS_DISABLE ? 0 : before.ss_size));
}

/* stack-now IS-RAW: reads the alternate stack. */
static void op_stack_now(const struct operation *operation) {
    stack_t now = {0};
    long answer = operation->argument[0] ? syscall(SYS_sigaltstack, NULL, &now) : sigaltstack(NULL, &now);
    int is_none = now.ss_flags & SS_DISABLE;
    say(operation, answer, mix(now.ss_flags + 1, is_none ? 0 : now.ss_size + (now.ss_sp == own_stack.ss_sp)));
}

/* mask HOW SIGNAL */
static void op_mask(const struct operation *operation) {
    sigset_t mask, before;
    sigemptyset(&mask);
    sigaddset(&mask, operation->argument[1]);
    long answer = pthread_sigmask(operation->argument[0], &mask, &before);
    say(operation, answer, *(uint64_t *)&before + 1);
}

/* mask-now: blocked and pending signals. */
static void op_mask_now(const struct operation *operation) {
    sigset_t mask, pending;
    long answer = pthread_sigmask(SIG_BLOCK, NULL, &mask);
    sigpending(&pending);
    say(operation, answer, mix(*(uint64_t *)&mask + 1, *(uint64_t *)&pending));
}

/* take SIGNAL HOW: raises a blocked signal and takes it. */
static void op_take(const struct operation *operation) {
    sigset_t mask, before;
    siginfo_t info = {0};
    struct timespec time = {0, 50000000};
    struct signalfd_siginfo read_info = {0};
    int number = operation->argument[0], got = 0;
    sigemptyset(&mask);
    sigaddset(&mask, number);
    pthread_sigmask(SIG_BLOCK, &mask, &before);
    raise(number);
    long answer = -1;
    switch (operation->argument[1]) {
    case 0: answer = sigwait(&mask, &got); break;
    case 1: answer = sigtimedwait(&mask, &info, &time); break;
    case 2: answer = sigwaitinfo(&mask, &info); break;
    default:
        got = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
        answer = got < 0 ? -1 : read(got, &read_info, sizeof read_info);
        close(got);
        got = read_info.ssi_signo;
    }
    say(operation, answer, got + info.si_signo + 1);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* own-fault SLOT FLAGS COUNT: the history's own handler jumps out of faults. */
static void jump(int number) {
    siglongjmp(*landing, number);
}
static void op_own_fault(const struct operation *operation) {
    struct slot *slot = slot_of(operation, 0);
    struct sigaction action = {.sa_handler = jump, .sa_flags = operation->argument[1]}, segv, bus;
    volatile long faults = 0;
    sigjmp_buf here, *before = landing;
    if (!slot->at || landing) return;
    long answer = mprotect(slot->at, PAGE, PROT_NONE);
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    landing = &here;
    for (volatile long turn = 0; turn < operation->argument[2]; turn++) {
        int number = sigsetjmp(here, 1);
        if (number)
            faults += number;
        else
            *(volatile char *)slot->at = 1;
    }
    landing = before;
    sigaction(SIGSEGV, &segv, NULL);
    sigaction(SIGBUS, &bus, NULL);
    if (!answer) mprotect(slot->at, PAGE, PROT_READ | PROT_WRITE);
    say(operation, faults, sum_of_slot(slot));
}

/* storm SLOT TURNS FLAGS: fills, pages out and checks memory while a timer sends signals. */
static volatile long rung;
static void ring(int number) {
    rung++;
}
static void op_storm(const struct operation *operation) {
    struct slot *slot = slot_of(operation, 0);
    struct sigaction action = {.sa_handler = ring, .sa_flags = SA_RESTART | operation->argument[2]}, before;
    struct itimerval every = {{0, 300}, {0, 300}}, never = {0};
    uint64_t sum = 1, other = 0;
    if (!slot->at) return;
    rung = 0;
    sigaction(SIGALRM, &action, &before);
    setitimer(ITIMER_REAL, &every, NULL);
    for (long turn = 0; turn < operation->argument[1] || (rung < 3 && turn < 100000); turn++) {
        fill(slot->at, slot->pages, turn % 16);
        uint64_t first = sum_of_slot(slot);
        page_out(slot->at, slot->pages * PAGE);
        other += sum_of_slot(slot) != first;
        if (turn < operation->argument[1]) sum = mix(sum, first);
    }
    setitimer(ITIMER_REAL, &never, NULL);
    /* Some pages have bytes of an earlier turn, and the number of turns depends on time. */
    for (int turn = 0; turn < 16; turn++) fill(slot->at, slot->pages, turn);
    sigaction(SIGALRM, &before, NULL);
    say(operation, other, sum);
}

const struct action signal_actions[] = {
    {"handle", op_handle}, {"ignore", op_ignore}, {"default", op_default}, {"raise", op_raise}, {"stack", op_stack},
    {"stack-now", op_stack_now}, {"mask", op_mask}, {"mask-now", op_mask_now}, {"take", op_take}, {"own-fault", op_own_fault},
    {"storm", op_storm}, {NULL, NULL}};
