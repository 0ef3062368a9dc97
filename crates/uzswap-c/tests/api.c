/* Calls every function of uzswap.h, rightly and wrongly. Ends with 0, or at the first failed check
 * with its line. The arguments are a file to write and the mode. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <uzswap.h>

#define CHECK(what)                                                                          \
    do {                                                                                     \
        if (!(what)) {                                                                       \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, uzswap_last_error());      \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)
#define SAYS(text) CHECK(strstr(uzswap_last_error(), text) != NULL)

enum { MEMORY = 8 << 20, BYTES = 32 << 20 };

static unsigned char byte_at(size_t i) {
    return (unsigned char)(i / 4096 + i % 61);
}

/* Options of programs that were compiled with an older or a newer header. */
static void sizes_of_other_headers(uint64_t memory) {
    struct {
        uzswap_options known;
        uint64_t unknown;
    } newer = {UZSWAP_OPTIONS_INIT, 0};
    newer.known.memory = memory;
    newer.known.size = sizeof newer;
    uzswap_pager *pager = uzswap_pager_new(&newer.known);
    CHECK(pager != NULL && uzswap_pager_free(pager) == 0);
    newer.unknown = 1;
    CHECK(uzswap_pager_new(&newer.known) == NULL);
    SAYS("does not know");

    uzswap_options older = UZSWAP_OPTIONS_INIT;
    older.memory = memory;
    /* Members that the older header lacks: the library must not read them. */
    older.compressor = "squash";
    older.mode = older.on_fork = older.reclaim_threads = older.reserved = 77;
    older.size = offsetof(uzswap_options, compressor);
    pager = uzswap_pager_new(&older);
    CHECK(pager != NULL && uzswap_pager_free(pager) == 0);
    older.compressor = "lz4";
    older.size = offsetof(uzswap_options, mode);
    older.backing = NULL;
    pager = uzswap_pager_new(&older);
    CHECK(pager != NULL && uzswap_pager_free(pager) == 0);
    older.size = offsetof(uzswap_options, memory);
    CHECK(uzswap_pager_new(&older) == NULL);
}

static sigjmp_buf back;
static volatile sig_atomic_t caught;

static void jump(int number) {
    caught += number == SIGBUS;
    siglongjmp(back, 1);
}

/* Causes a SIGBUS that is not of a region: only such signals reach the program's own handler. */
static void bus_error(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    volatile char *beyond = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
    CHECK(file >= 0 && beyond != MAP_FAILED);
    if (sigsetjmp(back, 1) == 0)
        CHECK(beyond[0] == 1); /* never reached */
    CHECK(munmap((void *)beyond, 4096) == 0 && close(file) == 0);
}

static void handlers_may_be_set_later(uzswap_pager *pager, unsigned char *region, const char *path) {
    struct sigaction action;
    CHECK(signal(SIGBUS, jump) == SIG_DFL); /* System V's signal: for one delivery */
    for (sig_atomic_t round = 1; round <= 3; round++) {
        CHECK(uzswap_advise(pager, region, BYTES, UZSWAP_ADVICE_PAGE_OUT) == 0);
        for (size_t i = 0; i < BYTES; i += 13)
            CHECK(region[i] == byte_at(i));
        bus_error(path);
        CHECK(caught == round && sigaction(SIGBUS, NULL, &action) == 0);
        CHECK(action.sa_handler == (round == 1 ? SIG_DFL : jump));
        action.sa_handler = jump;
        action.sa_flags = 0;
        CHECK(sigaction(SIGBUS, &action, NULL) == 0);
    }
    action.sa_handler = SIG_DFL;
    CHECK(sigaction(SIGBUS, &action, NULL) == 0);
}

static void options_are_checked(void) {
    CHECK(uzswap_pager_new(NULL) == NULL);
    uzswap_options options = UZSWAP_OPTIONS_INIT;
    CHECK(uzswap_pager_new(&options) == NULL); /* no memory given */
    options.memory = MEMORY;
    options.size = 3;
    CHECK(uzswap_pager_new(&options) == NULL);
    SAYS("UZSWAP_OPTIONS_INIT");
    options.size = sizeof options;
    sizes_of_other_headers(MEMORY);
    options.mode = 77;
    CHECK(uzswap_pager_new(&options) == NULL);
    SAYS("77");
    options.mode = UZSWAP_MODE_DEFAULT;
    options.compressor = "squash";
    CHECK(uzswap_pager_new(&options) == NULL);
    SAYS("squash");
}

static void foreign_memory_is_refused(uzswap_pager *pager, char *region) {
    char foreign[64];
    CHECK(uzswap_unmap(pager, foreign) == -1);
    SAYS("region");
    CHECK(uzswap_unmap(pager, region + 4096) == -1);
    CHECK(uzswap_pin(pager, foreign, sizeof foreign) == -1);
    CHECK(uzswap_unpin(pager, region, 4096) == -1); /* not pinned */
    CHECK(uzswap_touch(pager, region + BYTES - 1, 2) == -1);
    CHECK(uzswap_advise(pager, region, 4096, 99) == -1);
    CHECK(uzswap_unmap(NULL, region) == -1);
    CHECK(uzswap_pager_free(pager) == -1); /* the region is still mapped */
}

static int largest(const char *name, uint64_t value, void *context) {
    uint64_t *pages = context;
    if (strcmp(name, "stored_pages") == 0)
        *pages = value;
    return 0;
}

static void files_are_read_and_written(uzswap_pager *pager, unsigned char *region, const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(file >= 0);
    CHECK(uzswap_advise(pager, region, BYTES, UZSWAP_ADVICE_PAGE_OUT) == 0);
    CHECK(uzswap_write(file, region, BYTES) == BYTES);
    CHECK(uzswap_pwrite(file, region, 4096, BYTES) == 4096);
    CHECK(lseek(file, 0, SEEK_SET) == 0);
    CHECK(uzswap_advise(pager, region, BYTES, UZSWAP_ADVICE_DONT_NEED) == 0);
    CHECK(region[4096 * 5 + 7] == 0);
    CHECK(uzswap_read(file, region, BYTES) == BYTES);
    for (size_t i = 0; i < BYTES; i += 13)
        CHECK(region[i] == byte_at(i));
    CHECK(uzswap_pread(file, region + 100, 4096, BYTES) == 4096);
    CHECK(memcmp(region + 100, region, 100) == 0);
    CHECK(uzswap_pread(file, region, 4096, BYTES + 4096) == 0); /* the end of the file */
    close(file);
    CHECK(uzswap_read(file, region, 4096) == -1 && errno == EBADF);
}

static void a_fork_has_a_copy(uzswap_pager *pager, unsigned char *region) {
    pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < BYTES; i++)
            CHECK(region[i] == byte_at(i));
        memset(region, 7, BYTES);
        CHECK(uzswap_touch(pager, region, 4096) == -1);
        SAYS("fork");
        CHECK(uzswap_unmap(pager, region) == 0);
        CHECK(uzswap_unmap(pager, region) == -1);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (size_t i = 0; i < BYTES; i++)
        CHECK(region[i] == byte_at(i));
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    CHECK(uzswap_last_error()[0] == '\0');
    options_are_checked();

    uzswap_options options = UZSWAP_OPTIONS_INIT;
    options.memory = MEMORY;
    options.compressor = "lz4";
    options.mode = (uint32_t)atoi(arguments[2]);
    options.on_fork = 77;
    CHECK(uzswap_pager_new(&options) == NULL);
    SAYS("77");
    options.on_fork = UZSWAP_ON_FORK_COPY;
    uzswap_pager *pager = uzswap_pager_new(&options);
    CHECK(pager != NULL);
    unsigned char *region = uzswap_map(pager, BYTES);
    CHECK(region != NULL);
    for (size_t i = 0; i < BYTES; i++)
        region[i] = byte_at(i);
    for (size_t i = 0; i < BYTES; i++)
        CHECK(region[i] == byte_at(i));
    foreign_memory_is_refused(pager, (char *)region);
    a_fork_has_a_copy(pager, region);

    uint64_t stored = 0, same = 0;
    CHECK(uzswap_stats(pager, largest, &stored) == 0 && stored > 0);
    CHECK(uzswap_stat(pager, "stored_pages", &same) == 0 && same > 0);
    CHECK(uzswap_stat(pager, "no_such_thing", &same) == -1);
    SAYS("no_such_thing");

    /* System calls may use pinned memory in any mode. */
    CHECK(uzswap_advise(pager, region, BYTES, UZSWAP_ADVICE_PAGE_OUT) == 0);
    CHECK(uzswap_pin(pager, region + 4096, 1 << 20) == 0);
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK(write(pipes[1], region + 4096, 4096) == 4096);
    CHECK(read(pipes[0], region + 8192, 4096) == 4096);
    CHECK(memcmp(region + 4096, region + 8192, 4096) == 0);
    for (size_t i = 8192; i < 12288; i++)
        region[i] = byte_at(i);
    CHECK(uzswap_unpin(pager, region + 4096, 1 << 20) == 0);
    CHECK(uzswap_pin(pager, region, BYTES) == -1); /* four times the memory */

    handlers_may_be_set_later(pager, region, arguments[1]);
    files_are_read_and_written(pager, region, arguments[1]);
    CHECK(uzswap_set_memory(pager, MEMORY * 2) == 0);
    CHECK(uzswap_set_memory(pager, 1) == -1);
    CHECK(uzswap_touch(pager, region, MEMORY / 2) == 0);
    CHECK(uzswap_unmap(pager, region) == 0);
    CHECK(uzswap_unmap(pager, region) == -1);
    CHECK(uzswap_pager_free(pager) == 0);
    CHECK(uzswap_pager_free(NULL) == 0);
    return 0;
}
