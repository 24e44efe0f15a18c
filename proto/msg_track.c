#include "proto/msg_track.h"
#include "base/check.h"

void msg_track_begin(msg_track_t *self, uint64_t generation, uint64_t sequence)
{
    if (generation > self->generation) {
        *self = (msg_track_t){generation, sequence};
    } else if (generation == self->generation) {
        self->sequence = LK_MAX(self->sequence, sequence);
    }
}

bool msg_track_gap(msg_track_t *self, uint64_t generation, uint64_t sequence)
{
    if (sequence == 0 || generation < self->generation) {
        return false;
    }
    msg_track_begin(self, generation, 0);
    bool gap = sequence > self->sequence + 1;
    self->sequence = LK_MAX(self->sequence, sequence);
    return gap;
}
