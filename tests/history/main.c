/* `history FILE [LINE]`: performs a file's operations, or the block below a line of it. See history.h. */
#include "history.h"
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>

enum { OPERATIONS = 1024, LINE = 256 };

char *program, *history;
static struct operation operations[OPERATIONS];
static int count;

static const struct action *const parts[] = {memory_actions, process_actions, signal_actions,
                                             thread_actions, file_actions,    call_actions};

static const struct word words[] = {
    /* access */
    {"none", PROT_NONE}, {"r", PROT_READ}, {"rw", PROT_READ | PROT_WRITE}, {"rx", PROT_READ | PROT_EXEC},
    {"w", PROT_WRITE},
    /* maps */
    {"private", MAP_PRIVATE | MAP_ANONYMOUS}, {"shared", MAP_SHARED | MAP_ANONYMOUS}, {"noreserve", MAP_NORESERVE},
    {"populate", MAP_POPULATE}, {"growsdown", MAP_GROWSDOWN}, {"stack", MAP_STACK}, {"locked", MAP_LOCKED},
    {"droppable", 8 | MAP_ANONYMOUS}, {"fixed", MAP_FIXED}, {"noreplace", MAP_FIXED_NOREPLACE}, {"private-file", MAP_PRIVATE},
    {"shared-file", MAP_SHARED},
    /* moves */
    {"maymove", MREMAP_MAYMOVE}, {"to", MREMAP_FIXED}, {"dontunmap", 4},
    /* advice */
    {"normal", MADV_NORMAL}, {"random", MADV_RANDOM}, {"sequential", MADV_SEQUENTIAL}, {"willneed", MADV_WILLNEED},
    {"dontneed", MADV_DONTNEED}, {"free", MADV_FREE}, {"remove", MADV_REMOVE}, {"dontfork", MADV_DONTFORK},
    {"dofork", MADV_DOFORK}, {"hugepage", MADV_HUGEPAGE}, {"nohugepage", MADV_NOHUGEPAGE}, {"dontdump", MADV_DONTDUMP},
    {"dodump", MADV_DODUMP}, {"wipeonfork", MADV_WIPEONFORK}, {"keeponfork", MADV_KEEPONFORK}, {"cold", 20},
    {"pageout", 21}, {"populate-read", 22}, {"populate-write", 23}, {"dontneed-locked", 24}, {"unknown", 77},
    /* signals, and how they are handled */
    {"hup", SIGHUP}, {"usr1", SIGUSR1}, {"usr2", SIGUSR2}, {"pipe", SIGPIPE}, {"alrm", SIGALRM}, {"chld", SIGCHLD},
    {"winch", SIGWINCH}, {"bus", SIGBUS}, {"segv", SIGSEGV}, {"ill", SIGILL}, {"xfsz", SIGXFSZ}, {"rt", 40}, {"term", SIGTERM},
    {"plain", 0}, {"onstack", SA_ONSTACK}, {"restart", SA_RESTART}, {"nodefer", SA_NODEFER}, {"resethand", (int)SA_RESETHAND},
    {"block", SIG_BLOCK}, {"unblock", SIG_UNBLOCK}, {"set", SIG_SETMASK},
    /* files */
    {"read-only", O_RDONLY}, {"write-only", O_WRONLY}, {"read-write", O_RDWR}, {"append", O_APPEND}, {"create", O_CREAT},
    {"truncate", O_TRUNC}, {"cloexec", O_CLOEXEC},
    /* limits */
    {"as", RLIMIT_AS}, {"fsize", RLIMIT_FSIZE}, {"stack-size", RLIMIT_STACK}, {"sigpending", RLIMIT_SIGPENDING},
    {"nofile", RLIMIT_NOFILE}, {"data", RLIMIT_DATA}, {"core", RLIMIT_CORE}, {"memlock", RLIMIT_MEMLOCK},
    {NULL, 0}};

static void append(char *line, const char *text) {
    size_t length = strlen(line), room = LINE - 2 - length, more = strlen(text);
    memcpy(line + length, text, more < room ? more : room);
}

static void append_number(char *line, uint64_t number, int base) {
    char digits[24] = {0}, *at = digits + 22;
    do *at = "0123456789abcdef"[number % base], number /= base;
    while (number && at-- > digits);
    append(line, at);
}

static void print(char *line) {
    append(line, "\n");
    line[LINE - 1] = 0;
    const char *at = line;
    for (size_t left = strlen(line); left;) {
        ssize_t written = write(1, at, left);
        if (written < 0 && errno != EINTR && errno != EAGAIN) return;
        if (written > 0) at += written, left -= written;
    }
}

static void begin(char *line, const struct operation *operation) {
    append_number(line, operation->at + 1, 10);
    append(line, " ");
    append(line, operation->action->name);
}

void say(const struct operation *operation, long answer, uint64_t sum) {
    char line[LINE] = {0};
    int error = errno;
    begin(line, operation);
    append(line, " = ");
    if (answer < 0) {
        append(line, "-");
        append_number(line, -answer, 10);
        append(line, " ");
        append(line, strerrorname_np(error) ? strerrorname_np(error) : "no error");
    } else
        append_number(line, answer, 10);
    if (sum) append(line, " #"), append_number(line, sum, 16);
    print(line);
    errno = error;
}

void say_text(const struct operation *operation, const char *text) {
    char line[LINE] = {0};
    int error = errno;
    begin(line, operation);
    append(line, ": ");
    append(line, text);
    print(line);
    errno = error;
}

void end(const char *text, int status) {
    char line[LINE] = {0};
    append(line, text);
    print(line);
    _exit(status);
}

static long value_of(char *text) {
    long value = 0;
    for (char *part = strtok(text, "+"); part; part = strtok(NULL, "+")) {
        char *rest;
        long number = strtol(part, &rest, 0);
        const struct word *word = words;
        if (*rest)
            for (; word->name && strcmp(word->name, part);) word++;
        if (*rest && !word->name) end(part, 98);
        value |= *rest ? word->value : number;
    }
    return value;
}

static const struct action *action_of(const char *name) {
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
        for (const struct action *action = parts[part]; action->name; action++)
            if (!strcmp(action->name, name)) return action;
    return NULL;
}

static void parse(FILE *file) {
    for (char line[LINE]; fgets(line, sizeof line, file) && count < OPERATIONS; count++) {
        struct operation *operation = &operations[count];
        char *rest, *at = line, *tokens[ARGUMENTS + 2];
        int number = 0;
        for (char *token = strtok_r(at, " \n", &rest); token && number < ARGUMENTS + 2; token = strtok_r(NULL, " \n", &rest))
            tokens[number++] = token;
        if (number < 2 || !(operation->action = action_of(tokens[1]))) end(number < 2 ? "an empty line" : tokens[1], 98);
        operation->at = count;
        operation->depth = atoi(tokens[0]);
        operation->arguments = number - 2;
        for (int argument = 2; argument < number; argument++) operation->argument[argument - 2] = value_of(tokens[argument]);
    }
}

int has_block(const struct operation *of) {
    return of->at + 1 < count && operations[of->at + 1].depth > of->depth;
}

/* Deeper lines belong to the operations of the block, or to an operation that was dropped. */
static void run_from(int at, int depth) {
    for (; at < count && operations[at].depth >= depth; at++)
        if (operations[at].depth == depth) {
            errno = 0;
            operations[at].action->run(&operations[at]);
        }
}

void run_block(const struct operation *of) {
    run_from(of->at + 1, of->depth + 1);
}

int main(int argument_count, char **arguments) {
    if (argument_count < 2) end("history FILE [LINE]", 98);
    program = arguments[0];
    history = arguments[1];
    FILE *file = fopen(history, "r");
    if (!file) end("there is no such history", 98);
    parse(file);
    fclose(file);
    for (int at = 0; at < FILES; at++) files[at].reader = files[at].writer = -1;
    catch_faults(0);
    if (argument_count > 2) {
        run_block(&operations[atoi(arguments[2])]);
        end("the block is done", 0);
    }
    run_from(0, 0);
    char line[LINE] = {0};
    append(line, "done #");
    append_number(line, sum_of_all(), 16);
    print(line);
    exit(0);
}
