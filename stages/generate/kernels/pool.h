// Threads that share the chunks of a job.
//
// The caller works too, and it waits for chunks and not for threads: a thread that the kernel does not run delays at
// most the one chunk that it holds. Idle threads spin for some microseconds and then sleep.
#pragma once
#include <stdint.h>

// Compute one chunk; *thread* is below the number of threads, and no two run with the same one at once.
typedef void (*Chunk)(void *job, int64_t chunk, int thread);

// Of a job that is shared; the caller computes a larger one alone.
#define MOST_CHUNKS ((1 << 20) - 1)
#define MOST_THREADS 256

// Use *threads* threads from now on, the caller among them; those that are missing are started. Returns how many there
// are, which is fewer where the system gives no more.
int pool_use(int threads);
int pool_threads(void);

// Compute all chunks, [0, num_chunks), and return when the last one is done. One caller at a time.
void pool_run(Chunk function, void *job, int64_t num_chunks);
