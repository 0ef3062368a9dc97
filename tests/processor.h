// The parts of test programs that differ between processors: a system call by the program's own
// instruction, and the registers of an interrupted thread.
#include <sys/syscall.h>

static inline long own_call(long number, long a, long b, long c, long d, long e, long f) {
#ifdef __x86_64__
    register long fourth __asm__("r10") = d;
    register long fifth __asm__("r8") = e;
    register long sixth __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "+a"(number)
                     : "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    return number;
#else
    register long which __asm__("x8") = number;
    register long answer __asm__("x0") = a;
    register long second __asm__("x1") = b;
    register long third __asm__("x2") = c;
    register long fourth __asm__("x3") = d;
    register long fifth __asm__("x4") = e;
    register long sixth __asm__("x5") = f;
    __asm__ volatile("svc #0"
                     : "+r"(answer)
                     : "r"(which), "r"(second), "r"(third), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "memory");
    return answer;
#endif
}

// The address of the next instruction, the answer of a call, and the first argument of one.
#ifdef __x86_64__
#define NEXT_OF(context) (((ucontext_t *)(context))->uc_mcontext.gregs[REG_RIP])
#define ANSWER_OF(context) (((ucontext_t *)(context))->uc_mcontext.gregs[REG_RAX])
#define FIRST_OF(context) (((ucontext_t *)(context))->uc_mcontext.gregs[REG_RDI])
#else
#define NEXT_OF(context) (((ucontext_t *)(context))->uc_mcontext.pc)
#define ANSWER_OF(context) (((ucontext_t *)(context))->uc_mcontext.regs[0])
#define FIRST_OF(context) (((ucontext_t *)(context))->uc_mcontext.regs[0])
#endif

// Calls that aarch64 does not have: the C library makes these instead.
#ifndef SYS_fork
#define SYS_fork SYS_clone, SIGCHLD, 0, 0, 0, 0
#define SYS_open SYS_openat
#define SYS_poll SYS_ppoll
#define SYS_pause SYS_ppoll
#define SYS_epoll_wait SYS_epoll_pwait
#define SYS_select SYS_pselect6
#endif
