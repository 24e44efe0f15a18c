#include "base/port.h"

#include <string.h>

/* Longest address that an implementation keeps. */
#define MAX_ADDRESS 255

lk_status_t port_check_open(const char *address, const port_peer_t *identity, lk_error_t *err)
{
    bool ipc = strncmp(address, "ipc://", 6) == 0;
    size_t rest = strlen(address) - (strlen(address) > 6 ? 6 : 0);
    if ((!ipc && strncmp(address, "tcp://", 6) != 0) || strlen(address) <= 6) {
        return lk_error_set(err, LK_ERR_INVALID, "address '%.100s': neither ipc:// nor tcp://",
                            address);
    }
    if (strlen(address) > MAX_ADDRESS - 24 || (ipc && rest > PORT_MAX_IPC)) {
        return lk_error_set(err, LK_ERR_INVALID, "address '%.100s': too long", address);
    }
    if (identity != NULL &&
        (identity->len == 0 || identity->len > PORT_MAX_PEER || identity->id[0] == 0)) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "identity for %s: 1 to %d bytes, the first one not zero", address,
                            PORT_MAX_PEER);
    }
    return LK_OK;
}
