/* Memory: maps, moves, protection, advice, and content. */
#include "history.h"
#include <sys/resource.h>
#include <sys/user.h>
#include <ucontext.h>

struct slot slots[SLOTS];

/* Two accesses that may fault. The handler then makes these functions return the signal and its
 * code. */
extern char load_site[], store_site[], failed_site[];
long load_or_fail(const void *at, uint64_t *value);
long store_or_fail(void *at, uint64_t value);
asm(".text\n"
    ".globl load_or_fail, store_or_fail, load_site, store_site, failed_site\n"
#ifdef __x86_64__
    "load_or_fail:\nload_site:\n mov (%rdi), %rax\n mov %rax, (%rsi)\n xor %eax, %eax\n ret\n"
    "store_or_fail:\nstore_site:\n mov %rsi, (%rdi)\n xor %eax, %eax\n ret\n"
#else
    "load_or_fail:\nload_site:\n ldr x2, [x0]\n str x2, [x1]\n mov x0, #0\n ret\n"
    "store_or_fail:\nstore_site:\n str x1, [x0]\n mov x0, #0\n ret\n"
#endif
    "failed_site:\n ret\n");

long peek(const void *at, uint64_t *value) {
    return load_or_fail(at, value);
}
long poke(void *at, uint64_t value) {
    return store_or_fail(at, value);
}

static void on_fault(int number, siginfo_t *info, void *context) {
    char *at = (char *)NEXT_OF(context);
    if (at != load_site && at != store_site) end("a fault of its own, where none is", 97);
    if (info->si_addr != (void *)FIRST_OF(context)) end("a fault at another address", 97);
    NEXT_OF(context) = (long)failed_site;
    ANSWER_OF(context) = number << 8 | (info->si_code & 0xff);
}

void catch_faults(int flags) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | flags};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
}

uint64_t mix(uint64_t sum, uint64_t value) {
    sum = (sum ^ value) * 0x9e3779b97f4a7c15;
    return sum ^ sum >> 29;
}

uint64_t sum_of(const void *at, long bytes) {
    uint64_t sum = 1;
    for (long byte = 0; byte + 8 <= bytes; byte += 8) sum = mix(sum, *(const uint64_t *)((const char *)at + byte));
    for (long byte = bytes & -8; byte < bytes; byte++) sum = mix(sum, ((const unsigned char *)at)[byte]);
    return sum;
}

uint64_t sum_of_slot(const struct slot *slot) {
    uint64_t sum = slot->pages, value;
    for (long page = 0; page < slot->pages; page++) {
        long failed = peek(slot->at + page * PAGE, &value);
        sum = mix(sum, failed ? (uint64_t)failed : sum_of(slot->at + page * PAGE, PAGE));
    }
    return sum;
}

uint64_t sum_of_all(void) {
    uint64_t sum = 1;
    for (int at = 0; at < SLOTS; at++)
        if (slots[at].at) sum = mix(sum, sum_of_slot(&slots[at]));
    return sum;
}

long fill(char *at, long pages, uint64_t seed) {
    long first = 0;
    for (long page = 0; page < pages; page++) {
        uint64_t *word = (uint64_t *)(at + page * PAGE), value = mix(seed, page);
        long failed = poke(word, value);
        if (!first) first = failed;
        if (failed || value % 8 == 0) continue;
        for (long i = 0; i < PAGE / 8; i++) switch (value % 4) {
            case 0: word[i] = mix(value, i); break;
            case 1: word[i] = value; break;
            case 2: word[i] = i * seed; break;
            default: word[i] = i % 16 ? (uint64_t)word & 0xfff : mix(value, i) & 0xffff;
            }
    }
    return first;
}

char *map(long bytes) {
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

struct slot *slot_of(const struct operation *operation, int argument) {
    return &slots[operation->argument[argument] % SLOTS];
}

int is_apart(const struct slot *slot) {
    return slot->at >= ARENA(0) && slot->at < ARENA(SLOTS);
}

char *bytes_of(const struct slot *slot, long at, long *bytes) {
    long whole = is_apart(slot) || !slot->pages ? 32 * MIB : slot->pages * PAGE;
    at %= whole;
    if (*bytes > whole - at) *bytes = whole - at;
    return slot->at + at;
}

char *range_of(const struct operation *operation, int argument, long *pages) {
    const struct slot *slot = slot_of(operation, argument);
    long bytes = operation->argument[argument + 2] * PAGE;
    if (!slot->at) return NULL;
    char *at = bytes_of(slot, operation->argument[argument + 1] * PAGE, &bytes);
    *pages = bytes / PAGE;
    return at;
}

/* True if a page has left memory, but not to the kernel's swap. */
static int is_out(void *at) {
    unsigned char there = 1;
    uint64_t entry = 0;
    mincore(at, PAGE, &there);
    if (there & 1) return 0;
    int table = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (table < 0) return 1;
    (void)!pread(table, &entry, sizeof entry, (long)at / PAGE * (long)sizeof entry);
    close(table);
    return !(entry >> 62 & 1);
}

/* Without uzswap a page would go to the machine's swap, which the test of a killed device ends without its contents.
   MADV_COLD has the same answers, and the page stays. */
static int advise(void *at, long bytes, int advice) {
    int stays = advice == 21 && !getenv("UZSWAP_TREE");
    return madvise(at, bytes, stays ? 20 : advice);
}

void page_out(void *at, long bytes) {
    advise(at, bytes, 21);
}

/* map SLOT PAGES ACCESS FLAGS IS-IN-ARENA SEED [FILE]: replaces the slot's memory. */
static void op_map(const struct operation *operation) {
    struct slot *slot = slot_of(operation, 0);
    long pages = operation->argument[1], flags = operation->argument[3];
    if (slot->at) munmap(slot->at, slot->pages * PAGE);
    slot->at = NULL;
    int file = flags & MAP_ANONYMOUS ? -1 : files[operation->argument[6] % FILES].reader;
    char *hint = operation->argument[4] ? ARENA(operation->argument[0] % SLOTS) : NULL;
    if (hint) flags |= MAP_FIXED;
    char *at = mmap(hint, pages * PAGE, operation->argument[2], flags, file, 0);
    if (at == MAP_FAILED) {
        say(operation, -1, 0);
        return;
    }
    *slot = (struct slot){at, pages, (flags & MAP_TYPE) == MAP_SHARED};
    if (operation->argument[5]) fill(at, pages, operation->argument[5]);
    say(operation, 0, pages > 4096 ? 0 : sum_of_slot(slot));
}

/* sparse SLOT GIB PAGES SEED: reserves much address space and uses a few pages. */
static void op_sparse(const struct operation *operation) {
    long bytes = operation->argument[1] << 30, count = operation->argument[2];
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        say(operation, -1, 0);
        return;
    }
    uint64_t sum = 1;
    for (long i = 0; i < count; i++) fill(at + bytes / count / PAGE * PAGE * i, 1, operation->argument[3] + i);
    page_out(at, PAGE);
    for (long i = 0; i < count; i++) sum = mix(sum, sum_of(at + bytes / count / PAGE * PAGE * i, PAGE));
    say(operation, 0, sum);
    munmap(at, bytes);
}

/* unmap SLOT FIRST PAGES: leaves a hole. Neighbours could use it, so if there are any, unmaps the slot's end instead. */
static void op_unmap(const struct operation *operation) {
    struct slot *slot = slot_of(operation, 0);
    long pages;
    char *at = range_of(operation, 0, &pages);
    if (!at) return;
    if (!is_apart(slot)) {
        pages = slot->pages - (at - slot->at) / PAGE;
        slot->pages -= pages;
    }
    long answer = munmap(at, pages * PAGE);
    if (!slot->pages) slot->at = NULL;
    say(operation, answer, slot->at ? sum_of_slot(slot) : 0);
}

/* protect SLOT FIRST PAGES ACCESS */
static void op_protect(const struct operation *operation) {
    long pages;
    char *at = range_of(operation, 0, &pages);
    if (at) say(operation, mprotect(at, pages * PAGE, operation->argument[3]), sum_of_slot(slot_of(operation, 0)));
}

/* advise SLOT FIRST PAGES ADVICE IS-LOOKED-AT */
static void op_advise(const struct operation *operation) {
    long pages;
    char *at = range_of(operation, 0, &pages);
    if (!at) return;
    long answer = advise(at, pages * PAGE, operation->argument[3]);
    say(operation, answer, operation->argument[4] ? sum_of_slot(slot_of(operation, 0)) : 0);
}

/* lazy SLOT FIRST PAGES SEED: after MADV_FREE, each page must have its bytes or zeros. Then clears the pages. */
static void op_lazy(const struct operation *operation) {
    long pages, other = 0;
    char *at = range_of(operation, 0, &pages);
    if (!at || pages > 64) return;
    static const char zeros[PAGE];
    static char before[64 * PAGE];
    uint64_t value;
    for (long page = 0; page < pages; page++) {
        if (peek(at + page * PAGE, &value) || poke(at + page * PAGE, value)) return;
        memcpy(before + page * PAGE, at + page * PAGE, PAGE);
    }
    long answer = madvise(at, pages * PAGE, MADV_FREE);
    int error = errno;
    page_out(at, pages * PAGE);
    for (long page = 0; page < pages; page++) {
        char *now = at + page * PAGE;
        other += memcmp(now, before + page * PAGE, PAGE) && memcmp(now, zeros, PAGE);
        memset(now, 0, PAGE);
    }
    fill(at, pages, operation->argument[3]);
    errno = error;
    say(operation, answer, other + 1);
}

/* fill SLOT FIRST PAGES SEED */
static void op_fill(const struct operation *operation) {
    long pages;
    char *at = range_of(operation, 0, &pages);
    if (at) say(operation, fill(at, pages, operation->argument[3]), sum_of_slot(slot_of(operation, 0)));
}

/* check SLOT */
static void op_check(const struct operation *operation) {
    say(operation, 0, sum_of_slot(slot_of(operation, 0)));
}

/* check-all */
static void op_check_all(const struct operation *operation) {
    say(operation, 0, sum_of_all());
}

/* move SLOT FIRST PAGES NEW-PAGES FLAGS [TO-SLOT]: mremap of a range, also to another slot. */
static void op_move(const struct operation *operation) {
    long pages, flags = operation->argument[4];
    struct slot *from = slot_of(operation, 0), *to = slot_of(operation, 5);
    char *at = range_of(operation, 0, &pages), *target = is_apart(to) ? to->at : ARENA(operation->argument[5] % SLOTS);
    int is_whole = at == from->at && pages == from->pages;
    /* Neighbours could use the hole, or the room to grow. */
    if (!at || (!is_apart(from) && (!is_whole || !(flags & MREMAP_MAYMOVE)))) return;
    char *moved = mremap(at, pages * PAGE, operation->argument[3] * PAGE, flags, target);
    if (moved == MAP_FAILED) {
        say(operation, -1, mix(sum_of_slot(from), sum_of_slot(to)));
        return;
    }
    struct slot now = {moved, operation->argument[3], from->is_shared};
    if (flags & MREMAP_FIXED && to != from) {
        if (to->at && to->at != moved) munmap(to->at, to->pages * PAGE);
        else if (to->pages > now.pages) munmap(to->at + now.pages * PAGE, (to->pages - now.pages) * PAGE);
        *to = now;
        if (is_whole && !(flags & 4) && !is_apart(&(struct slot){at, pages, 0})) from->at = NULL;
    } else if (is_whole && !(flags & 4))
        *from = now;
    else {
        say(operation, moved == at, sum_of(moved, 0));
        if (moved != at) {
            uint64_t sum = sum_of_slot(&now);
            munmap(moved, now.pages * PAGE);
            say(operation, 1, sum);
        }
        return;
    }
    say(operation, 0, mix(from->at ? sum_of_slot(from) : 0, sum_of_slot(&now)));
}

/* lock SLOT FIRST PAGES, unlock SLOT FIRST PAGES */
static void op_lock(const struct operation *operation) {
    long pages;
    char *at = range_of(operation, 0, &pages);
    if (at) say(operation, mlock(at, pages * PAGE), sum_of_slot(slot_of(operation, 0)));
}
static void op_unlock(const struct operation *operation) {
    long pages;
    char *at = range_of(operation, 0, &pages);
    if (at) say(operation, munlock(at, pages * PAGE), sum_of_slot(slot_of(operation, 0)));
}

/* seal SLOT FIRST PAGES */
static void op_seal(const struct operation *operation) {
    long pages;
    char *at = range_of(operation, 0, &pages);
    if (at) say(operation, syscall(462, at, pages * PAGE, 0), sum_of_slot(slot_of(operation, 0)));
}

/* grow-down SLOT PAGES SEED: touches a MAP_GROWSDOWN mapping page by page below its start. */
static void op_grow_down(const struct operation *operation) {
    struct slot *slot = slot_of(operation, 0);
    long pages = operation->argument[1], failed = 0;
    if (slot->at) munmap(slot->at, slot->pages * PAGE);
    char *end = ARENA(operation->argument[0] % SLOTS) + 32 * MIB;
    char *at = mmap(end - PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_FIXED, -1, 0);
    if (at == MAP_FAILED) {
        say(operation, -1, 0);
        return;
    }
    for (long page = 0; page < pages && !failed; page++) failed = fill(end - (page + 1) * PAGE, 1, operation->argument[2] + page);
    *slot = (struct slot){end - pages * PAGE, pages, 0};
    say(operation, failed, sum_of_slot(slot));
}

/* key SLOT FIRST PAGES RIGHTS: pkey_mprotect. The thread's rights (0 all, 1 none, 2 no writing) hold while the memory is
   paged out and read. After that the thread has all rights. */
static void op_key(const struct operation *operation) {
    long pages;
    char *at = range_of(operation, 0, &pages);
    static int key;
    if (key <= 0) key = pkey_alloc(0, 0);
    if (!at || key <= 0) return;
    long answer = pkey_mprotect(at, pages * PAGE, PROT_READ | PROT_WRITE, key);
    int error = errno;
    pkey_set(key, operation->argument[3]);
    page_out(at, pages * PAGE);
    uint64_t sum = sum_of_slot(slot_of(operation, 0));
    pkey_set(key, 0);
    errno = error;
    say(operation, answer, mix(sum, sum_of_slot(slot_of(operation, 0))));
}

/* heap PAGES SEED: raises the program's break, uses the memory, and lowers the break again. */
static void op_heap(const struct operation *operation) {
    long bytes = operation->argument[0] * PAGE;
    char *at = sbrk(bytes);
    if (at == (char *)-1) {
        say(operation, -1, 0);
        return;
    }
    char *first = (char *)(((long)at + PAGE - 1) & -PAGE);
    fill(first, operation->argument[0] - 1, operation->argument[1]);
    page_out(first, bytes - PAGE);
    uint64_t sum = sum_of(first, bytes - PAGE);
    if (sbrk(0) == at + bytes) sbrk(-bytes);
    say(operation, 0, sum);
}

/* deep KIB: uses this much stack. */
static uint64_t descend(long kib, uint64_t seed) {
    volatile uint64_t frame[512];
    for (int i = 0; i < 512; i += 8) frame[i] = mix(seed, i);
    uint64_t below = kib > 4 ? descend(kib - 4, frame[8]) : 1;
    for (int i = 0; i < 512; i += 8)
        if (frame[i] != mix(seed, i)) end("the stack has other bytes", 96);
    return mix(below, frame[16]);
}
static void op_deep(const struct operation *operation) {
    say(operation, 0, descend(operation->argument[0], operation->at));
}

/* grow MIB KIB-A-MILLISECOND: takes memory at this rate; 0 for no pause. */
static char *grown[256];
static void op_grow(const struct operation *operation) {
    for (long mib = 0; mib < operation->argument[0]; mib++) {
        int slot = 0;
        while (slot < 255 && grown[slot]) slot++;
        if (!(grown[slot] = map(MIB))) end("there is no more memory", 96);
        fill(grown[slot], 256, slot);
        if (operation->argument[1]) usleep(MIB / operation->argument[1]);
    }
    say(operation, 0, 0);
}

/* settle: waits until pages leave, in runs in which pages leave (HISTORY_LEAVES). */
static void op_settle(const struct operation *operation) {
    if (getenv("HISTORY_LEAVES") && grown[0])
        for (int turn = 0; turn < 2000; turn++) {
            page_out(grown[0], 16 * PAGE);
            if (is_out(grown[0])) {
                (void)!write(2, "leaves\n", 7);
                break;
            }
            usleep(5000);
        }
    say(operation, 0, 0);
}

/* walk: reads all memory that `grow` took. */
static void op_walk(const struct operation *operation) {
    uint64_t sum = 1;
    for (int slot = 0; slot < 256 && grown[slot]; slot++) sum = mix(sum, sum_of(grown[slot], MIB));
    say(operation, 0, sum);
}

/* limit WHICH VALUE: the soft limit. */
static void op_limit(const struct operation *operation) {
    struct rlimit limit;
    getrlimit(operation->argument[0], &limit);
    limit.rlim_cur = operation->argument[1];
    say(operation, setrlimit(operation->argument[0], &limit), 0);
}

const struct action memory_actions[] = {
    {"map", op_map}, {"sparse", op_sparse}, {"unmap", op_unmap}, {"protect", op_protect}, {"advise", op_advise}, {"lazy", op_lazy},
    {"fill", op_fill}, {"check", op_check}, {"check-all", op_check_all}, {"move", op_move}, {"lock", op_lock},
    {"unlock", op_unlock}, {"seal", op_seal}, {"grow-down", op_grow_down}, {"key", op_key}, {"heap", op_heap}, {"deep", op_deep},
    {"grow", op_grow}, {"settle", op_settle}, {"walk", op_walk}, {"limit", op_limit}, {NULL, NULL}};
