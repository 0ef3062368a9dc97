/* Sets handlers of SIGBUS after its memory is paged, and has one. Ends with 0. */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(what)                                              \
    do {                                                         \
        if (!(what)) {                                           \
            fprintf(stderr, "line %d: %s\n", __LINE__, #what);   \
            exit(1);                                             \
        }                                                        \
    } while (0)

enum { COUNT = 4 << 20 };
static sigjmp_buf back;
static volatile sig_atomic_t caught;

static void handler(int number) {
    caught += number == SIGBUS;
    siglongjmp(back, 1);
}

static void long_handler(int number, siginfo_t *info, void *context) {
    CHECK(info->si_addr != NULL && context != NULL);
    handler(number);
}

/* Touches a file beyond its end. */
static void bus_error(void) {
    char path[] = "/tmp/uzswap-signals-XXXXXX";
    int file = mkstemp(path);
    CHECK(file >= 0 && unlink(path) == 0);
    volatile char *at = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
    CHECK(at != MAP_FAILED);
    if (sigsetjmp(back, 1) == 0)
        CHECK(at[0] == 1); /* never reached */
    munmap((void *)at, 4096);
    close(file);
}

static void check(const uint64_t *numbers) {
    for (uint64_t i = 0; i < COUNT; i++)
        CHECK(numbers[i] == i / 5);
}

int main(void) {
    uint64_t *numbers = malloc(COUNT * sizeof *numbers);
    CHECK(numbers != NULL);
    for (uint64_t i = 0; i < COUNT; i++)
        numbers[i] = i / 5;
    CHECK(signal(SIGBUS, handler) == SIG_DFL);
    check(numbers);
    bus_error();
    CHECK(caught == 1);

    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = long_handler;
    action.sa_flags = SA_SIGINFO;
    CHECK(sigaction(SIGBUS, &action, &before) == 0 && before.sa_handler == handler);
    check(numbers);
    bus_error();
    CHECK(sigaction(SIGBUS, NULL, &before) == 0 && before.sa_sigaction == long_handler);
    action.sa_flags |= SA_RESETHAND;
    CHECK(sigaction(SIGBUS, &action, NULL) == 0);
    bus_error();
    CHECK(caught == 3);
    CHECK(sigaction(SIGBUS, NULL, &before) == 0 && before.sa_handler == SIG_DFL);
    check(numbers);

    /* All others are as ever. */
    CHECK(signal(SIGUSR1, SIG_IGN) == SIG_DFL && signal(SIGUSR1, SIG_DFL) == SIG_IGN);
    free(numbers);
    return 0;
}
