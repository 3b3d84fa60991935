/**
 * Work per peer: each peer has its own queue and its own share of what is under way, so one that answers slowly, or not at all,
 * holds up nobody else.
 */
export interface PeerQueues {
  /** `work` never rejects. */
  add(peer: string, work: () => Promise<void>): void;
  /** Under way, or waiting for its turn. */
  readonly size: number;
  idle(): Promise<void>;
}

export function createPeerQueues({ perPeer }: { perPeer: number }): PeerQueues {
  const queues = new Map<string, { running: number; readonly waiting: (() => Promise<void>)[] }>();
  const running = new Set<Promise<void>>();
  let waiting = 0;

  function next(peer: string): void {
    const queue = queues.get(peer);
    if (queue === undefined) return;
    while (queue.running < perPeer) {
      const work = queue.waiting.shift();
      if (work === undefined) break;
      waiting -= 1;
      queue.running += 1;
      const run = work().finally(() => {
        running.delete(run);
        queue.running -= 1;
        next(peer);
      });
      running.add(run);
    }
    if (queue.running === 0 && queue.waiting.length === 0) queues.delete(peer);
  }

  return {
    add(peer, work) {
      const queue = queues.get(peer) ?? { running: 0, waiting: [] };
      queues.set(peer, queue);
      queue.waiting.push(work);
      waiting += 1;
      next(peer);
    },
    get size() {
      return running.size + waiting;
    },
    async idle() {
      while (running.size > 0) await Promise.all(running);
    },
  };
}
