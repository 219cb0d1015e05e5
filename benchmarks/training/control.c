/* The control program of couriers.py. For each byte on its standard input it moves as many bytes as two couriers do.

   A courier reads its slot for checksums, gives it to MPI, takes the partner's slot from MPI and reads it for checksums.
   These are two copies and two reads of each rank's bytes. The argument is the number of bytes per rank. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 2, CHUNK = 4 << 20 };

static uint64_t sum_of(const unsigned char *bytes, size_t nbytes) {
    uint64_t sum = 0, word;
    for (size_t at = 0; at + sizeof word <= nbytes; at += sizeof word) {
        memcpy(&word, bytes + at, sizeof word);
        sum = sum * 31 + word;
    }
    return sum;
}

int main(int count, char **arguments) {
    size_t nbytes = count > 1 ? strtoull(arguments[1], NULL, 10) / CHUNK * CHUNK : 0;
    unsigned char *slot = malloc(nbytes), *copy = malloc(nbytes), *between = malloc(CHUNK);
    if (!nbytes || !slot || !copy || !between) {
        return 1;
    }
    memset(slot, 1, nbytes);
    memset(copy, 1, nbytes);
    uint64_t sum = 0;
    for (char told; read(STDIN_FILENO, &told, 1) == 1;) {
        for (int rank = 0; rank < RANKS; rank++) {
            for (size_t at = 0; at < nbytes; at += CHUNK) {
                sum += sum_of(slot + at, CHUNK);
                memcpy(between, slot + at, CHUNK);
                memcpy(copy + at, between, CHUNK);
                sum += sum_of(copy + at, CHUNK);
            }
        }
        told = (char)sum;
        if (write(STDOUT_FILENO, &told, 1) != 1) {
            return 1;
        }
    }
    return 0;
}
