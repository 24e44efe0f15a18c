#include "base/loop.h"
#include "deploy/tool/tool.h"
#include "transfer/backends/nccl/tcpstore.h"
#include "transfer/backends/tcp/tcp_stream.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *host;
    uint16_t port;
} place_t;

static byte_stream_t *dial(void *ctx)
{
    const place_t *place = ctx;
    return tcp_stream_dial(place->host, place->port, lk_env_real());
}

static void usage(FILE *to)
{
    fprintf(
        to,
        "usage: lockstep tcpstore HOST PORT [--timeout SECONDS]\n"
        "  Joins a trainer's rendezvous (a torch TCPStore) as one worker would, and prints the\n"
        "  ncclUniqueId in base64. The store counts it as a worker: the trainer goes on without\n"
        "  one of the real ones.\n");
}

static bool parse_number(const char *text, double min, double max, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return end != text && *end == '\0' && *out >= min && *out <= max;
}

/* The worker's sequence; prints each thing it starts to wait for. */
static lk_status_t walk(tcpstore_client_t *client, uint8_t id[NCCL_ID_BYTES], lk_error_t *err)
{
    lk_loop_t *loop = loop_new(lk_env_real());
    if (loop == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    char last[512] = "", what[512];
    lk_status_t st;
    while ((st = tcpstore_client_step(client, id, err)) == LK_INPROGRESS) {
        tcpstore_client_waits_for(client, what, sizeof what);
        if (strcmp(what, last) != 0) {
            fprintf(stderr, "lockstep: waiting for %s\n", what);
            memcpy(last, what, sizeof last);
        }
        struct pollfd fd;
        size_t n = tcpstore_client_pollfds(client, &fd, 1);
        loop_wait(loop, &fd, n, lk_env_now_ns(lk_env_real()) + 100 * LK_MS_NS);
    }
    loop_destroy(&loop);
    return st;
}

int tool_tcpstore(int argc, char **argv)
{
    double port = 0, timeout_s = 30;
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        usage(stdout);
        return 0;
    }
    bool timed = argc == 5 && strcmp(argv[3], "--timeout") == 0;
    if ((argc != 3 && !timed) || !parse_number(argv[2], 1, 65535, &port) ||
        port != (double)(uint16_t)port ||
        (timed && !parse_number(argv[4], 0.01, 86400, &timeout_s))) {
        usage(stderr);
        return 2;
    }
    place_t place = {argv[1], (uint16_t)port};
    lk_error_t err = LK_ERROR_INIT;
    uint8_t id[NCCL_ID_BYTES];
    tcpstore_client_t *client = tcpstore_client_new(
        (tcpstore_dialer_t){dial, &place}, lk_env_real(), (uint64_t)(timeout_s * LK_SECOND_NS),
        (uint32_t)lk_env_random_u64(lk_env_real()));
    lk_status_t st = client != NULL ? walk(client, id, &err)
                                    : lk_error_set(&err, LK_ERR_NO_MEMORY, "out of memory");
    tcpstore_client_destroy(&client);
    if (st < 0) {
        fprintf(stderr, "lockstep: %s\n", err.text);
        return 1;
    }
    char text[4 * ((NCCL_ID_BYTES + 2) / 3) + 1];
    EVP_EncodeBlock((unsigned char *)text, id, NCCL_ID_BYTES);
    printf("%s\n", text);
    return fflush(stdout) == 0 ? 0 : 1;
}
