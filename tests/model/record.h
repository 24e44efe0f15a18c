/* record.h: rows of numbers, each different one written once to decide.rows. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define RECORD_SLOTS (1u << 22)

static struct {
    char text[2048], actions[1024];
    size_t n, n_actions;
    unsigned count;
    uint64_t seen[RECORD_SLOTS]; /* hashes of the rows written */
    FILE *file;
} recorder;

static void record_begin(void)
{
    recorder.n = recorder.n_actions = recorder.count = 0;
    recorder.actions[0] = '\0';
}

static void record(int value)
{
    recorder.n += (size_t)snprintf(recorder.text + recorder.n, sizeof recorder.text - recorder.n,
                                   "%d ", value);
}

static void record_action(int act, int call, int outcome)
{
    recorder.count++;
    recorder.n_actions += (size_t)snprintf(recorder.actions + recorder.n_actions,
                                           sizeof recorder.actions - recorder.n_actions,
                                           "%d %d %d ", act, call, outcome);
}

static void record_end(void)
{
    record((int)recorder.count);
    snprintf(recorder.text + recorder.n, sizeof recorder.text - recorder.n, "%s", recorder.actions);
    uint64_t hash = 1469598103934665603u;
    for (const char *p = recorder.text; *p != '\0'; p++) {
        hash = (hash ^ (unsigned char)*p) * 1099511628211u;
    }
    uint32_t at = hash % RECORD_SLOTS;
    while (recorder.seen[at] != 0 && recorder.seen[at] != hash) {
        at = (at + 1) % RECORD_SLOTS;
    }
    if (recorder.seen[at] == 0) {
        recorder.seen[at] = hash;
        if (recorder.file == NULL) {
            recorder.file = fopen("decide.rows", "w");
        }
        fprintf(recorder.file, "%s\n", recorder.text);
        fflush(recorder.file);
    }
}
