#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "entry.h"
#include "kernels.h"

// Pauses before a thread sleeps: each takes 40 to 140 cycles, so all take 20 to 100 microseconds.
#define SPINS 2000

// A thread that has waited for so many times the duration of its own chunk, or for so long, computes a chunk of another
// thread a second time.
#define TIMES_OF_OWN 2
#define LEAST_WAIT_NS 5000
#define WAIT_WITHOUT_OWN_NS 50000
#define SPINS_OF_A_LOOK 20 // at the clock
#define MOST_AGAIN 4096 // a job with more chunks is only computed once

#define COUNT_BITS 20
#define COUNT_MASK ((1u << COUNT_BITS) - 1)
#define ONE_DONE ((uint64_t)1 << COUNT_BITS)

static struct {
    // The job (24 bits) and how many of its shares are done (20).
    _Alignas(64) _Atomic uint64_t ticket;
    _Atomic int waiting; // threads that sleep on the word's upper half
    // What idle threads sleep on; it changes with each call of `pool_together`.
    _Alignas(64) _Atomic uint32_t calls;
    _Atomic int sleepers;
    // Threads in the call, but for the caller, which sleeps on it.
    _Alignas(64) _Atomic uint32_t inside;
    _Atomic int caller_sleeps;
    _Alignas(64) _Atomic int is_open; // whether threads may begin the call
    _Atomic(Together) function;
    _Atomic(void *) argument;
    _Atomic uint64_t first_job; // what `Member.job` begins with
    _Atomic int threads;        // that may work
    int started;                // that exist, the caller among them
    uint64_t renewed;           // the job before which the shares were renewed
} pool = {.ticket = (uint64_t)1 << (2 * COUNT_BITS), .threads = 1, .started = 1};

// Each thread has a share of the chunks of a job, chunks beside each other, which it takes before any others. So threads seldom
// meet at a word, and a thread computes the same rows of a matrix each time, which lie in its part of memory: it packed them.
// A word has the job (24 bits), the chunks that are done (20), and the next one that nobody has taken (20). All in one, so that
// a thread that comes late cannot take a chunk of a job that follows. Who takes the first chunk begins the share.
static struct {
    _Alignas(64) _Atomic uint64_t ticket;
} shares[MOST_THREADS];

// The last job in which a chunk of this number was published.
static _Atomic uint64_t published[MOST_AGAIN];

// ---- a core for each thread
//
// Where other processes need the cores now and then, Linux lets a thread and the caller share one. That another core is
// free again it sees some ticks later, after 8 to 12 ms: for longer than many steps take. So the caller sends a thread
// that is on its own core to another one. If that is busy, the thread does not begin the jobs that follow. Then it is
// brought back, and the next try comes later.

#define FIRST_PAUSE_NS 500000
#define LONGEST_PAUSE_NS 2000000
#define PATIENCE_NS 100000

static struct {
    _Alignas(64) _Atomic int id; // of Linux; 0: it has not begun
    _Atomic int core;            // where it began its last job
    _Atomic uint32_t jobs;       // that it has begun
} threads[MOST_THREADS];

// For the caller alone.
static struct {
    int thread;    // that was sent to another core; 0: none
    uint32_t jobs; // that it had begun before
    int64_t sent_ns, next_ns, pause_ns;
} sent = {.pause_ns = FIRST_PAUSE_NS};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// Move a thread to *core*, or away from it. Later it may run on the same cores as before. Returns whether there is such a
// core.
static int move(int thread, int core, int away) {
    cpu_set_t allowed, wanted;
    int id = atomic_load(&threads[thread].id);
    if (sched_getaffinity(id, sizeof allowed, &allowed)) return 0;
    wanted = allowed;
    if (away) CPU_CLR(core, &wanted);
    else {
        CPU_ZERO(&wanted);
        CPU_SET(core, &wanted);
    }
    if (!CPU_COUNT(&wanted) || sched_setaffinity(id, sizeof wanted, &wanted)) return 0;
    sched_setaffinity(id, sizeof allowed, &allowed);
    return 1;
}

// Called with each job, once the threads are awake.
static void spread(void) {
    int core = sched_getcpu(), used = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    int64_t now = now_ns();
    if (sent.thread) {
        if (atomic_load_explicit(&threads[sent.thread].jobs, memory_order_relaxed) != sent.jobs) {
            sent.thread = 0;
            sent.pause_ns = FIRST_PAUSE_NS;
        } else if (now - sent.sent_ns > PATIENCE_NS) {
            move(sent.thread, core, 0);
            sent.thread = 0;
            sent.pause_ns = 2 * sent.pause_ns < LONGEST_PAUSE_NS ? 2 * sent.pause_ns : LONGEST_PAUSE_NS;
        }
    } else if (now >= sent.next_ns) {
        sent.next_ns = now + sent.pause_ns;
        for (int thread = 1; thread < used && !sent.thread; thread++) {
            uint32_t jobs = atomic_load_explicit(&threads[thread].jobs, memory_order_relaxed);
            if (!jobs || atomic_load_explicit(&threads[thread].core, memory_order_relaxed) != core) continue;
            if (!move(thread, core, 1)) continue;
            sent.thread = thread;
            sent.jobs = jobs;
            sent.sent_ns = now;
        }
    }
}

// ---- jobs

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word, int threads) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, threads, 0, 0, 0); }

// How many jobs the word is ahead of *number*.
static int ahead(uint64_t ticket, uint64_t number) {
    return (int32_t)(((uint32_t)(ticket >> (2 * COUNT_BITS)) - (uint32_t)number) << 8) >> 8;
}

static int64_t done_of(uint64_t ticket) { return (int64_t)(ticket >> COUNT_BITS) & COUNT_MASK; }

// The word's upper half, where jobs are counted.
static _Atomic uint32_t *upper_half(void) { return (_Atomic uint32_t *)&pool.ticket + 1; }

static uint64_t ticket_of(uint64_t number) { return (number & 0xffffff) << (2 * COUNT_BITS); }

// The first chunk of a share.
static int64_t first_of(int64_t share, int64_t num_chunks) { return share * num_chunks / pool_threads(); }

// Take a chunk of a share; return it, or -1: none is left.
static int64_t take(int share, uint64_t job, int64_t num_chunks) {
    const int64_t first = first_of(share, num_chunks), count = first_of(share + 1, num_chunks) - first;
    uint64_t ticket = atomic_load_explicit(&shares[share].ticket, memory_order_acquire);
    for (;;) {
        const int lead = ahead(ticket, job);
        const uint64_t begun = lead < 0 ? ticket_of(job) : ticket;
        const int64_t next = (int64_t)(begun & COUNT_MASK);
        if (lead > 0 || next >= count) return -1;
        if (atomic_compare_exchange_weak(&shares[share].ticket, &ticket, begun + 1)) return first + next;
    }
}

// Go on to the job that follows *number*, if all shares of that are done and nobody has gone on.
static void go_on(uint64_t ticket, uint64_t number, int64_t num_chunks) {
    if (done_of(ticket) != least(num_chunks, pool_threads())) return; // the others are empty
    uint64_t next = ticket_of(number + 1);
    if (atomic_compare_exchange_strong(&pool.ticket, &ticket, next) && atomic_load(&pool.waiting))
        wake(upper_half(), INT_MAX);
}

// Compute a chunk that this thread has taken, or that another one has taken and not published.
static void compute_chunk(Member *me, Chunk compute, Chunk publish, void *job, int64_t chunk, int64_t num_chunks) {
    int64_t begun_ns = now_ns();
    compute(job, chunk, me->thread);
    if (publish) {
        if (num_chunks <= MOST_AGAIN) {
            uint64_t last = atomic_load(&published[chunk]);
            if (last >= me->job || !atomic_compare_exchange_strong(&published[chunk], &last, me->job)) return;
        }
        publish(job, chunk, me->thread);
    }
    me->chunk_ns = now_ns() - begun_ns;
    // No thread has gone on: this chunk was not done.
    const int64_t share = ((chunk + 1) * pool_threads() - 1) / num_chunks;
    const int64_t done = done_of(atomic_fetch_add(&shares[share].ticket, ONE_DONE)) + 1;
    if (done == first_of(share + 1, num_chunks) - first_of(share, num_chunks))
        go_on(atomic_fetch_add(&pool.ticket, ONE_DONE) + ONE_DONE, me->job, num_chunks);
}

// Return a chunk that is taken and not published; -1: none.
static int64_t unpublished(const Member *me, int64_t num_chunks) {
    for (int64_t chunk = num_chunks - 1; chunk >= 0; chunk--)
        if (atomic_load(&published[chunk]) < me->job) return chunk;
    return -1;
}

// Sleep until the job is done, or for *most_ns*; 0: as long as it takes.
static void sleep_through(uint64_t number, int64_t most_ns) {
    struct timespec most = {0, most_ns};
    atomic_fetch_add(&pool.waiting, 1);
    uint64_t ticket = atomic_load(&pool.ticket);
    if (ahead(ticket, number) <= 0)
        syscall(SYS_futex, upper_half(), FUTEX_WAIT_PRIVATE, (uint32_t)(ticket >> 32), most_ns ? &most : 0, 0, 0);
    atomic_fetch_sub(&pool.waiting, 1);
}

// All chunks are taken: wait until the last one is done, or until it is time to compute one of them again; return it, or -1.
static int64_t wait_for_others(const Member *me, int may_compute_again, int64_t num_chunks) {
    int64_t patience_ns = me->chunk_ns ? TIMES_OF_OWN * me->chunk_ns : WAIT_WITHOUT_OWN_NS, until_ns = 0;
    if (may_compute_again) until_ns = now_ns() + (patience_ns < LEAST_WAIT_NS ? LEAST_WAIT_NS : patience_ns);
    for (int spins = 1;; spins++) {
        if (ahead(atomic_load_explicit(&pool.ticket, memory_order_acquire), me->job) > 0) return -1;
        int64_t left_ns = 0;
        if (until_ns && spins % SPINS_OF_A_LOOK == 0 && (left_ns = until_ns - now_ns()) <= 0) {
            int64_t chunk = unpublished(me, num_chunks);
            if (chunk >= 0) return chunk;
            until_ns = left_ns = 0; // all are being published
        }
        if (spins % SPINS) pause_briefly();
        else sleep_through(me->job, left_ns);
    }
}

void pool_share(Member *me, Chunk compute, Chunk publish, void *job, int64_t num_chunks) {
    if (pool_threads() == 1) {
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
            compute(job, chunk, 0);
            if (publish) publish(job, chunk, 0);
        }
        return;
    }
    me->job++;
    me->chunk_ns = 0;
    if (me->thread == 0) spread();
    else {
        atomic_store_explicit(&threads[me->thread].core, sched_getcpu(), memory_order_relaxed);
        atomic_fetch_add_explicit(&threads[me->thread].jobs, 1, memory_order_relaxed);
    }
    for (int empty = 0;;) { // so many shares, its own the first of them, have nothing left
        uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
        if (ahead(ticket, me->job) > 0) return;
        int64_t chunk;
        if (empty < pool_threads()) {
            chunk = take((me->thread + empty) % pool_threads(), me->job, num_chunks);
            if (chunk < 0) {
                empty++;
                continue;
            }
        } else {
            go_on(ticket, me->job, num_chunks); // a job without chunks
            chunk = wait_for_others(me, publish && num_chunks <= MOST_AGAIN, num_chunks);
            if (chunk < 0) return;
        }
        compute_chunk(me, compute, publish, job, chunk, num_chunks);
    }
}

// ---- calls

static void run_together(int thread) {
    atomic_fetch_add(&pool.inside, 1);
    if (atomic_load(&pool.is_open) && thread < pool_threads()) { // nothing of the call changes while a thread is inside
        Member me = {.thread = thread, .job = atomic_load(&pool.first_job)};
        atomic_load(&pool.function)(atomic_load(&pool.argument), &me);
    }
    if (atomic_fetch_sub(&pool.inside, 1) == 1 && atomic_load(&pool.caller_sleeps)) wake(&pool.inside, 1);
}

static void *run_thread(void *argument) {
    int thread = (int)(intptr_t)argument;
    uint32_t seen = 0;
    enter(); // for the life of the thread
    atomic_store(&threads[thread].id, (int)syscall(SYS_gettid));
    for (;;) {
        uint32_t calls;
        int spins = 0;
        while ((calls = atomic_load_explicit(&pool.calls, memory_order_acquire)) == seen) {
            if (++spins < SPINS) {
                pause_briefly();
                continue;
            }
            atomic_fetch_add(&pool.sleepers, 1);
            if (atomic_load(&pool.calls) == seen) sleep_while(&pool.calls, seen);
            atomic_fetch_sub(&pool.sleepers, 1);
            spins = 0;
        }
        seen = calls;
        run_together(thread);
    }
    return 0;
}

int pool_use(int threads) {
    if (threads < 1) threads = 1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    sigset_t all, before; // signals are for the threads of Python
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool.started < threads; pool.started++) {
        pthread_t one;
        if (pthread_create(&one, 0, run_thread, (void *)(intptr_t)pool.started)) break;
        pthread_detach(one);
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    int used = threads < pool.started ? threads : pool.started;
    atomic_store(&pool.threads, used);
    return used;
}

int pool_threads(void) { return atomic_load_explicit(&pool.threads, memory_order_relaxed); }

void pool_together(Together function, void *argument) {
    Member me = {.thread = 0, .job = atomic_load(&pool.first_job)};
    if (pool_threads() == 1) {
        function(argument, &me);
        return;
    }
    if (pool.renewed >> 20 != me.job >> 20) { // a share that is empty for 2^23 jobs would seem to be ahead
        for (int thread = 0; thread < MOST_THREADS; thread++) atomic_store(&shares[thread].ticket, ticket_of(me.job));
        pool.renewed = me.job;
    }
    atomic_store(&pool.function, function);
    atomic_store(&pool.argument, argument);
    atomic_store(&pool.is_open, 1);
    atomic_fetch_add(&pool.calls, 1);
    if (atomic_load(&pool.sleepers)) wake(&pool.calls, INT_MAX);
    function(argument, &me);
    atomic_store(&pool.is_open, 0);
    int spins = 0;
    uint32_t inside;
    while ((inside = atomic_load(&pool.inside))) {
        if (++spins < SPINS) {
            pause_briefly();
            continue;
        }
        atomic_store(&pool.caller_sleeps, 1);
        if ((inside = atomic_load(&pool.inside))) sleep_while(&pool.inside, inside);
        atomic_store(&pool.caller_sleeps, 0);
    }
    atomic_store(&pool.first_job, me.job);
}
