/* A PING client that costs next to nothing: IN_FLIGHT requests at a time on one DEALER, for some seconds.
 *
 * ping_peer URL IN_FLIGHT SECONDS TEMPLATE_HEX ID_OFFSET
 *
 * The template is one request; its 8-byte little-endian id is set to the slot of the request. Prints "ready", waits for
 * a line, then writes the elapsed seconds as a double and each round trip's microseconds as floats to stdout.
 * It declares what it needs of libzmq by itself, so that the library alone (pyzmq's own) is enough to build it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void *zmq_ctx_new(void);
void *zmq_socket(void *, int);
int zmq_connect(void *, const char *);
int zmq_setsockopt(void *, int, const void *, size_t);
int zmq_send(void *, const void *, size_t, int);
int zmq_recv(void *, void *, size_t, int);

enum { DEALER = 5, RCVTIMEO = 27, MAX_FRAME = 4096, MAX_TRIPS = 1 << 24 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    if (argc != 6)
        return 2;
    int in_flight = atoi(argv[2]), offset = atoi(argv[5]), timeout = 10000;
    double seconds = atof(argv[3]);
    size_t size = strlen(argv[4]) / 2;
    unsigned char frame[MAX_FRAME], reply[MAX_FRAME];
    for (size_t i = 0; i < size; i++)
        sscanf(argv[4] + 2 * i, "%2hhx", &frame[i]);
    void *peer = zmq_socket(zmq_ctx_new(), DEALER);
    zmq_setsockopt(peer, RCVTIMEO, &timeout, sizeof timeout);
    if (zmq_connect(peer, argv[1]) || zmq_send(peer, frame, size, 0) < 0 || zmq_recv(peer, reply, sizeof reply, 0) < 0)
        return 1;
    double *sent = calloc(in_flight, sizeof *sent);
    float *trips = malloc(MAX_TRIPS * sizeof *trips);
    size_t count = 0;
    puts("ready");
    fflush(stdout);
    if (getchar() == EOF)
        return 1;
    double begin = now(), time = begin;
    for (uint64_t slot = 0; slot < (uint64_t)in_flight; slot++) {
        memcpy(frame + offset, &slot, 8);
        sent[slot] = now();
        zmq_send(peer, frame, size, 0);
    }
    while (time - begin < seconds && count < MAX_TRIPS) {
        uint64_t slot;
        if (zmq_recv(peer, reply, sizeof reply, 0) < offset + 8)
            return 1;
        memcpy(&slot, reply + offset, 8);
        if (slot >= (uint64_t)in_flight)
            return 1;
        time = now();
        trips[count++] = (time - sent[slot]) * 1e6;
        sent[slot] = time;
        memcpy(frame + offset, &slot, 8);
        zmq_send(peer, frame, size, 0);
    }
    double elapsed = time - begin;
    fwrite(&elapsed, sizeof elapsed, 1, stdout);
    fwrite(trips, sizeof *trips, count, stdout);
    return 0;
}
