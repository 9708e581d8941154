// Threads that compute together.
//
// They all run the same function, and in it they meet the same jobs in the same order. Each thread has a share of the chunks of
// a job, and takes those of others when it has computed its own. So no thread leads, and one that Linux does not run for a
// while holds nobody up: the others take its next chunks, compute the one that it holds a second time, and go on without it.
// When it runs again, it skips the jobs that are done. Idle threads spin for some microseconds and then sleep.
#pragma once
#include <stdint.h>

// A thread that computes with others.
typedef struct {
    int thread;        // its index, below the number of threads
    uint64_t job;      // that it has begun, counted over the life of the process
    int64_t chunk_ns;  // how long its last chunk of this job took; 0: it had none
} Member;

// What all threads run. It may read what a job has written once `pool_share` has returned. But a thread that is late may
// read what jobs after it are writing. So what it reads must be safe to use in any state, and the number and order of jobs
// must not depend on it.
typedef void (*Together)(void *argument, Member *me);

// One chunk of a job. No two run with the same *thread* at once.
typedef void (*Chunk)(void *job, int64_t chunk, int thread);

#define MOST_CHUNKS ((1 << 20) - 1) // of a job
#define MOST_THREADS 256

// Use *threads* threads from now on, the caller among them; those that are missing are started. Returns how many there
// are, which is fewer where the system gives no more.
int pool_use(int threads);
int pool_threads(void);

// Run a function on all threads; return when all have left it. One caller at a time.
void pool_together(Together function, void *argument);

// Compute all chunks, [0, num_chunks), of the next job. Returns when the last one is done. Every thread calls it, with a *job*
// that says the same.
//
// With a *publish*, several threads may compute the same chunk. So *compute* writes nothing but memory of its thread, and
// then *publish*, which is called once for each chunk, on a thread that has computed it, writes what others read.
void pool_share(Member *me, Chunk compute, Chunk publish, void *job, int64_t num_chunks);
