/* malloc and its relatives, over the size from which a block is a region: contents follow a block
 * wherever it moves. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                   \
    do {                                                              \
        if (!(what)) {                                                \
            fprintf(stderr, "line %d: %s\n", __LINE__, #what);        \
            exit(1);                                                  \
        }                                                             \
    } while (0)

enum { MIB = 1 << 20 };

static void fill(unsigned char *block, size_t from, size_t to) {
    for (size_t i = from; i < to; i++)
        block[i] = (unsigned char)(i / 999 + i);
}

static void check(const unsigned char *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 7)
        CHECK(block[i] == (unsigned char)(i / 999 + i));
}

static void *churn(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    unsigned char *blocks[8] = {NULL};
    size_t bytes[8] = {0};
    for (int i = 0; i < 300; i++) {
        int at = rand_r(&seed) % 8;
        size_t wanted = rand_r(&seed) % 2 ? rand_r(&seed) % (2 * MIB) : rand_r(&seed) % 5000 + 1;
        blocks[at] = realloc(blocks[at], wanted + 1);
        CHECK(blocks[at]);
        check(blocks[at], bytes[at] < wanted ? bytes[at] : wanted);
        fill(blocks[at], bytes[at] < wanted ? bytes[at] : wanted, wanted);
        bytes[at] = wanted;
        if (i % 5 == 0) {
            free(blocks[at]);
            blocks[at] = NULL;
            bytes[at] = 0;
        }
    }
    for (int at = 0; at < 8; at++) {
        check(blocks[at] ? blocks[at] : (unsigned char *)"", bytes[at]);
        free(blocks[at]);
    }
    return NULL;
}

/* A child's blocks are its own, and can be freed and made larger. */
static void forks(void) {
    unsigned char *kept = malloc(40 * MIB), *freed = malloc(3 * MIB);
    fill(kept, 0, 40 * MIB);
    fill(freed, 0, 3 * MIB);
    pid_t child = fork();
    if (child == 0) {
        check(kept, 40 * MIB);
        check(freed, 3 * MIB);
        free(freed);
        kept = realloc(kept, 50 * MIB);
        check(kept, 40 * MIB);
        memset(kept, 7, 50 * MIB);
        free(kept);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    check(kept, 40 * MIB);
    free(kept);
    free(freed);
}

/* What a program drops reads as zeros, and nothing else does. */
static void drops(void) {
    unsigned char *block = aligned_alloc(4096, 40 * MIB);
    fill(block, 0, 40 * MIB);
    CHECK(madvise(block, 40 * MIB, MADV_HUGEPAGE) == 0 || errno == EINVAL);
    CHECK(madvise(block + 8 * MIB, 4 * MIB, MADV_DONTNEED) == 0);
    for (size_t i = 8 * MIB; i < 12 * MIB; i++)
        CHECK(block[i] == 0);
    fill(block, 8 * MIB, 12 * MIB);
    check(block, 40 * MIB);
    errno = 0;
    CHECK(madvise(block + 1, 4096, MADV_DONTNEED) == -1 && errno == EINVAL);
    free(block);
}

/* Pages of this program in memory. */
static size_t resident(void) {
    size_t all = 0, here = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%zu %zu", &all, &here) == 2 && fclose(file) == 0);
    return here;
}

/* Blocks at multiples of more than a page are paged if others are. */
static void aligned_blocks(void) {
    int is_paged = 0;
    for (size_t align = 16; align <= 2 * MIB; align *= 128) {
        unsigned char *block = aligned_alloc(align, 64 * MIB);
        CHECK((uintptr_t)block % align == 0);
        fill(block, 0, 64 * MIB);
        if (align == 16)
            is_paged = resident() < 40 * MIB / 4096;
        CHECK(!is_paged || resident() < 40 * MIB / 4096);
        check(block, 64 * MIB);
        free(block);
    }
}

/* A block that becomes a little smaller stays where it is, and what is behind it goes. */
static void shrinks(void) {
    unsigned char *block = malloc(64 * MIB), *before = block;
    fill(block, 0, 64 * MIB);
    block = realloc(block, 40 * MIB + 5);
    CHECK(block == before && malloc_usable_size(block) >= 40 * MIB + 5);
    check(block, 40 * MIB + 5);
    block = realloc(block, 64 * MIB);
    CHECK(block != NULL);
    check(block, 40 * MIB + 5);
    fill(block, 40 * MIB + 5, 64 * MIB);
    check(block, 64 * MIB);
    free(block);
}

int main(void) {
    size_t sizes[] = {100, 3 * MIB, 40 * MIB, 5000, 2 * MIB, 1, 64 * MIB, 1000};
    unsigned char *block = NULL;
    size_t held = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        block = realloc(block, sizes[i]);
        CHECK(block && malloc_usable_size(block) >= sizes[i]);
        check(block, held < sizes[i] ? held : sizes[i]);
        fill(block, held < sizes[i] ? held : sizes[i], sizes[i]);
        held = sizes[i];
    }
    free(block);

    unsigned char *zeros = calloc(20, MIB);
    for (size_t i = 0; i < 20 * MIB; i++)
        CHECK(zeros[i] == 0);
    free(zeros);
    /* volatile: the compiler knows what these ask for. */
    volatile size_t most = SIZE_MAX / 2;
    errno = 0;
    CHECK(calloc(most, 3) == NULL && errno == ENOMEM);
    CHECK(malloc(most) == NULL && errno == ENOMEM);

    void *aligned = NULL;
    CHECK(posix_memalign(&aligned, 4096, 4 * MIB) == 0 && (uintptr_t)aligned % 4096 == 0);
    free(aligned);
    CHECK(posix_memalign(&aligned, 1 << 16, 4 * MIB) == 0 && (uintptr_t)aligned % (1 << 16) == 0);
    free(aligned);
    CHECK(posix_memalign(&aligned, 3, 4 * MIB) == EINVAL);
    aligned = aligned_alloc(64, 2 * MIB);
    CHECK((uintptr_t)aligned % 64 == 0);
    free(aligned);
    free(NULL);
    aligned_blocks();
    shrinks();
    drops();
    forks();

    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
