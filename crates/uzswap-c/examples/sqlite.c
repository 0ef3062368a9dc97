/* A database in memory, four times as large as the memory it may take: an unchanged SQLite, with its
 * page cache in a region.
 *
 *     cc sqlite.c $(pkg-config --cflags --libs uzswap sqlite3) -o sqlite && ./sqlite
 *     ./sqlite plain      # the same in ordinary memory
 *
 * Prints figures of the database; the report on memory goes to standard error.
 */
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>
#include <uzswap.h>

enum { PAGES = 8 << 10 };

static const char *const script =
    "CREATE TABLE word (number INTEGER PRIMARY KEY, length INTEGER, text TEXT);"
    "WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < 40000)"
    "  INSERT INTO word SELECT n, n * 7919 % 1000, printf('%08x the same words and %d', n * 2654435761"
    "    & 4294967295, n * 31 % 9973) || substr(hex(n * n), 1, 30) || printf('%.300c', '-')"
    "    FROM counted;"
    "CREATE INDEX by_length ON word (length, text);"
    "UPDATE word SET text = text || ' again' WHERE number % 97 = 0;"
    "DELETE FROM word WHERE number % 89 = 0;"
    "SELECT count(*), sum(length), sum(length(text)) FROM word;"
    "SELECT length, count(*), min(text), max(text) FROM word WHERE length % 100 = 1 GROUP BY length;"
    "PRAGMA integrity_check;";

static int print_row(void *context, int columns, char **values, char **names) {
    (void)context, (void)names;
    for (int i = 0; i < columns; i++)
        printf("%s%s", values[i] ? values[i] : "", i + 1 < columns ? " | " : "\n");
    return 0;
}

int main(int count, char **arguments) {
    int is_plain = count > 1 && strcmp(arguments[1], "plain") == 0;
    uzswap_pager *pager = NULL;
    if (!is_plain) {
        int header; /* bytes that SQLite adds to each page of 4096 bytes */
        sqlite3_config(SQLITE_CONFIG_PCACHE_HDRSZ, &header);
        int each = (4096 + header + 7) / 8 * 8;
        uzswap_options options = UZSWAP_OPTIONS_INIT;
        options.memory = (uint64_t)each * PAGES / 4;
        options.backing = "/var/tmp/uzswap-sqlite.pages:256M";
        pager = uzswap_pager_new(&options);
        remove("/var/tmp/uzswap-sqlite.pages"); /* its content goes with the process */
        void *cache = pager ? uzswap_map(pager, (size_t)each * PAGES) : NULL;
        if (!cache) {
            fprintf(stderr, "sqlite: %s\n", uzswap_last_error());
            return 1;
        }
        sqlite3_config(SQLITE_CONFIG_PAGECACHE, cache, each, PAGES);
    }

    sqlite3 *database;
    char *error = NULL;
    if (sqlite3_open(":memory:", &database) != SQLITE_OK ||
        sqlite3_exec(database, script, print_row, NULL, &error) != SQLITE_OK) {
        fprintf(stderr, "sqlite: %s\n", error ? error : sqlite3_errmsg(database));
        return 1;
    }
    int current, highest;
    sqlite3_status(SQLITE_STATUS_PAGECACHE_USED, &current, &highest, 0);
    if (pager) {
        uint64_t stored = 0;
        uzswap_stat(pager, "stored_pages", &stored);
        fprintf(stderr, "%d of %d pages of the database in the region, %llu pages of it compressed\n",
                highest, PAGES, (unsigned long long)stored);
    }
    sqlite3_close(database);
    return 0;
}
