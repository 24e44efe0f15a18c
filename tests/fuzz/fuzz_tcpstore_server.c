/*
 * Fuzz target: a trainer's store, which listens on a port, and what strangers say to it. The input
 * is a list of messages: which of three connections (its low bits; bit 6: the store looks before
 * the rest comes, bit 7: it is closed afterwards), how many bytes, and those. Every step ends, an
 * honest worker is served whatever the others do, and its count is one more than before.
 */
#include "base/check.h"
#include "transfer/backends/nccl/tcpstore.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define N_PEERS 3

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct sockaddr_un address; /* of an abstract name, which the system chooses */
static socklen_t address_len;

static int listen_here(void)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    address.sun_family = AF_UNIX;
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(sa_family_t)) == 0);
    address_len = sizeof address;
    CHECK(getsockname(fd, (struct sockaddr *)&address, &address_len) == 0 && listen(fd, 8) == 0);
    return fd;
}

static int dial(void)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&address, address_len) == 0);
    return fd;
}

/* What there is no room for is lost: strangers are no better. */
static void say(int fd, const uint8_t *bytes, size_t n)
{
    ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    CHECK(sent >= 0 || errno == EAGAIN || errno == EPIPE || errno == ECONNRESET);
}

static void expect(int fd, const void *bytes, size_t n)
{
    uint8_t got[32];
    CHECK(n <= sizeof got && recv(fd, got, n, MSG_DONTWAIT) == (ssize_t)n);
    CHECK(bytes == NULL || memcmp(got, bytes, n) == 0);
}

static void be_an_honest_worker(tcpstore_server_t *store)
{
    static const uint8_t ping[] = {0, 0xce, 0xf7, 0x85, 0x3c, 13, 1, 2, 3, 4};
    static const uint8_t add[] = {4,   5,   0,   0, 0, 0, 0, 0, 0, 'i', 'n',
                                  'i', 't', '/', 1, 0, 0, 0, 0, 0, 0,   0};
    int64_t before = tcpstore_server_workers(store), after = 0;
    int fd = dial();
    say(fd, ping, sizeof ping);
    tcpstore_server_step(store);
    expect(fd, ping + 6, 4);
    if (before < INT64_MAX) { /* else it is not to be counted */
        say(fd, add, sizeof add);
        tcpstore_server_step(store);
        /* strangers may have filled the store, and may have set a text that is no number */
        ssize_t n = recv(fd, &after, sizeof after, MSG_DONTWAIT);
        CHECK(n == 0 || (n == sizeof after && after == before + 1 &&
                         tcpstore_server_workers(store) == after));
    }
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    tcpstore_server_t *store = tcpstore_server_new(listen_here());
    int peers[N_PEERS];
    CHECK(store != NULL);
    for (size_t i = 0; i < N_PEERS; i++) {
        peers[i] = dial();
    }
    tcpstore_server_step(store);
    for (size_t at = 0; at + 2 <= size;) {
        uint8_t what = data[at];
        size_t n = LK_MIN((size_t)data[at + 1], size - at - 2);
        int *peer = &peers[what % 4 % N_PEERS];
        say(*peer, data + at + 2, n);
        at += 2 + n;
        if (what & 64) {
            tcpstore_server_step(store);
        }
        if (what & 128) {
            close(*peer);
            *peer = dial();
        }
    }
    tcpstore_server_step(store);
    struct pollfd fds[N_PEERS + 8];
    size_t n_fds = tcpstore_server_pollfds(store, fds, LK_ARRAY_LEN(fds));
    CHECK(n_fds >= 1);
    be_an_honest_worker(store);
    for (size_t i = 0; i < N_PEERS; i++) {
        close(peers[i]);
    }
    tcpstore_server_step(store);
    CHECK(tcpstore_server_pollfds(store, fds, LK_ARRAY_LEN(fds)) == 1);
    tcpstore_server_destroy(&store);
    return 0;
}
