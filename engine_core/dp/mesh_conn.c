#include "base/check.h"
#include "engine_core/dp/mesh_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

mesh_conn_t *mesh_conn_new(int fd)
{
    mesh_conn_t *self = malloc(sizeof *self);
    CHECKF(self != NULL, "out of memory for a mesh connection");
    memset(self, 0, offsetof(mesh_conn_t, stage));
    self->fd = fd;
    self->rank = -1;
    lk_buf_init(&self->control, 0);
    return self;
}

void mesh_conn_destroy(mesh_conn_t **self_p)
{
    if (self_p != NULL && *self_p != NULL) {
        close((*self_p)->fd);
        lk_buf_fini(&(*self_p)->control);
        free(*self_p);
        *self_p = NULL;
    }
}

/* ---- writing ---- */

void mesh_conn_queue(mesh_conn_t *self, const mesh_header_t *head, const void *body)
{
    lk_buf_append(&self->control, head, sizeof *head);
    lk_buf_append(&self->control, body, head->length);
    CHECKF(!self->control.failed, "out of memory for a control frame");
}

bool mesh_conn_has_output(const mesh_conn_t *self)
{
    return self->ex_active || self->control_sent < self->control.len;
}

void mesh_conn_cancel_exchange(mesh_conn_t *self)
{
    size_t total = sizeof self->ex_head + self->ex_head.length;
    if (self->ex_active && self->ex_sent > 0 && self->ex_sent < total) {
        /* the peer counts on the rest of the frame: keep a copy, in front of the control frames */
        lk_buf_t all;
        size_t in_head = LK_MIN(self->ex_sent, sizeof self->ex_head);
        size_t in_data = self->ex_sent - in_head;
        lk_buf_init(&all, 0);
        lk_buf_append(&all, (const uint8_t *)&self->ex_head + in_head,
                      sizeof self->ex_head - in_head);
        lk_buf_append(&all, self->ex_data + in_data, self->ex_head.length - in_data);
        lk_buf_append(&all, self->control.data + self->control_sent,
                      self->control.len - self->control_sent);
        CHECKF(!all.failed, "out of memory for the rest of an exchange");
        lk_buf_fini(&self->control);
        self->control = all;
        self->control_sent = 0;
    }
    self->ex_active = false;
}

static ssize_t write_some(mesh_conn_t *self, const struct iovec *iov, size_t n)
{
    struct msghdr msg = {.msg_iov = (struct iovec *)(uintptr_t)iov, .msg_iovlen = n};
    ssize_t sent;
    do {
        sent = sendmsg(self->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent;
}

static ssize_t write_exchange(mesh_conn_t *self)
{
    struct iovec iov[2];
    size_t n = 0, in_head = LK_MIN(self->ex_sent, sizeof self->ex_head);
    size_t in_data = self->ex_sent - in_head;
    if (in_head < sizeof self->ex_head) {
        iov[n++] =
            (struct iovec){(uint8_t *)&self->ex_head + in_head, sizeof self->ex_head - in_head};
    }
    if (in_data < self->ex_head.length) {
        iov[n++] = (struct iovec){(void *)(uintptr_t)(self->ex_data + in_data),
                                  self->ex_head.length - in_data};
    }
    ssize_t sent = write_some(self, iov, n);
    if (sent > 0) {
        self->ex_sent += (size_t)sent;
        self->ex_active = self->ex_sent < sizeof self->ex_head + self->ex_head.length;
    }
    return sent;
}

static ssize_t write_control(mesh_conn_t *self)
{
    struct iovec iov = {self->control.data + self->control_sent,
                        self->control.len - self->control_sent};
    ssize_t sent = write_some(self, &iov, 1);
    if (sent > 0) {
        self->control_sent += (size_t)sent;
        if (self->control_sent == self->control.len) {
            lk_buf_clear(&self->control);
            self->control_sent = 0;
        }
    }
    return sent;
}

lk_status_t mesh_conn_flush(mesh_conn_t *self, lk_error_t *err)
{
    while (mesh_conn_has_output(self)) {
        bool begun = self->ex_active && self->ex_sent > 0;
        bool control = !begun && self->control_sent < self->control.len;
        ssize_t sent = control ? write_control(self) : write_exchange(self);
        if (sent < 0 && errno == EAGAIN) {
            return LK_INPROGRESS;
        }
        if (sent < 0) {
            return lk_error_set(err, LK_ERR_PEER, "%s",
                                errno == EPIPE || errno == ECONNRESET ? "closed its mesh connection"
                                                                      : strerror(errno));
        }
    }
    return LK_OK;
}

/* ---- reading ---- */

/* Reads into dst, or into the stage when dst is NULL. *drained: the socket had less than asked. */
static lk_status_t read_some(mesh_conn_t *self, uint8_t *dst, size_t len, size_t *got,
                             bool *drained, lk_error_t *err)
{
    ssize_t n;
    if (*drained) {
        return LK_INPROGRESS;
    }
    if (dst == NULL) {
        CHECK(self->stage_at == self->stage_len);
        dst = self->stage;
        len = sizeof self->stage;
    }
    do {
        n = recv(self->fd, dst, len, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN) {
        return LK_INPROGRESS;
    }
    if (n <= 0) {
        return lk_error_set(err, LK_ERR_PEER, "%s",
                            n == 0 || errno == ECONNRESET ? "closed its mesh connection"
                                                          : strerror(errno));
    }
    *drained = (size_t)n < len;
    *got = (size_t)n;
    return LK_OK;
}

/* Takes up to `len` bytes that were read already; dst NULL: throws them away. */
static size_t from_stage(mesh_conn_t *self, uint8_t *dst, size_t len)
{
    size_t n = LK_MIN(len, self->stage_len - self->stage_at);
    if (dst != NULL && n > 0) {
        memcpy(dst, self->stage + self->stage_at, n);
    }
    self->stage_at += n;
    return n;
}

static lk_status_t fill_stage(mesh_conn_t *self, bool *drained, lk_error_t *err)
{
    size_t got;
    lk_status_t status = read_some(self, NULL, 0, &got, drained, err);
    if (status == LK_OK) {
        self->stage_at = 0;
        self->stage_len = got;
    }
    return status;
}

static lk_status_t on_header(mesh_t *mesh, mesh_conn_t *self, lk_error_t *err)
{
    const mesh_header_t *head = &self->head;
    self->body = NULL;
    if (head->magic != MESH_MAGIC || head->version != MESH_VERSION) {
        return lk_error_set(err, LK_ERR_PEER, "sent what is no mesh frame of version %d",
                            MESH_VERSION);
    }
    if ((head->kind == FRAME_HELLO) == self->got_hello) {
        return lk_error_set(err, LK_ERR_PEER, "sent frame %u %s its hello", head->kind,
                            self->got_hello ? "after" : "before");
    }
    if (head->kind == FRAME_HELLO) {
        if (head->length != sizeof self->hello) {
            return lk_error_set(err, LK_ERR_PEER, "sent a hello of %llu bytes",
                                (unsigned long long)head->length);
        }
        self->body = (uint8_t *)&self->hello;
        return LK_OK;
    }
    if (head->length > MESH_MAX_EXCHANGE) {
        return lk_error_set(err, LK_ERR_PEER, "sent a frame of %llu bytes",
                            (unsigned long long)head->length);
    }
    if (head->epoch != mesh->epoch) {
        return LK_OK; /* another group's: dropped */
    }
    switch (head->kind) {
    case FRAME_VOTE:
        return mesh_vote_header(mesh, self, &self->body, err);
    case FRAME_EXCHANGE:
        return mesh_ep_header(mesh, self, &self->body, err);
    case FRAME_BYE:
        self->body = head->length == sizeof self->bye ? (uint8_t *)&self->bye : NULL;
        return LK_OK;
    default:
        return lk_error_set(err, LK_ERR_PEER, "sent a frame of unknown kind %u", head->kind);
    }
}

static lk_status_t on_frame(mesh_t *mesh, mesh_conn_t *self, lk_error_t *err)
{
    if (self->head.kind == FRAME_HELLO) {
        self->got_hello = true;
        self->epoch = self->head.epoch;
        return LK_OK;
    }
    if (self->head.epoch != mesh->epoch) {
        return LK_OK;
    }
    if (self->head.kind == FRAME_BYE) {
        self->bye.why[sizeof self->bye.why - 1] = '\0';
        self->got_bye = self->body != NULL;
        return lk_error_set(err, LK_ERR_PEER, "left the group");
    }
    return self->head.kind == FRAME_VOTE ? mesh_vote_frame(mesh, self, err)
                                         : mesh_ep_frame(mesh, self, err);
}

lk_status_t mesh_conn_read(mesh_t *mesh, mesh_conn_t *self, lk_error_t *err)
{
    bool drained = false;
    for (;;) {
        lk_status_t status = LK_OK;
        if (!self->in_body) {
            self->head_got += from_stage(self, (uint8_t *)&self->head + self->head_got,
                                         sizeof self->head - self->head_got);
            if (self->head_got < sizeof self->head) {
                status = fill_stage(self, &drained, err);
            } else {
                status = on_header(mesh, self, err);
                self->in_body = status == LK_OK;
                self->body_got = 0;
            }
            if (status != LK_OK) {
                return status;
            }
            continue;
        }
        uint8_t *to = self->body != NULL ? self->body + self->body_got : NULL;
        size_t left = self->head.length - self->body_got;
        size_t got = from_stage(self, to, left);
        if (got == 0 && left > 0) {
            if (to != NULL && left >= MESH_STAGE) {
                status = read_some(self, to, left, &got, &drained, err);
            } else {
                status = fill_stage(self, &drained, err);
            }
            if (status != LK_OK) {
                return status;
            }
        }
        self->body_got += got;
        if (self->body_got == self->head.length) {
            self->in_body = false;
            self->head_got = 0;
            LK_RETURN_IF_ERROR(on_frame(mesh, self, err));
            if (self->head.kind == FRAME_HELLO) {
                return LK_OK;
            }
        }
    }
}
