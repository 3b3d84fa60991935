/** A timer that waits in a virtual clock. */
export interface QueuedTimer {
  readonly atMs: number;
  readonly sequence: number;
  readonly run: () => void;
  cancelled: boolean;
}

export interface TimerQueue {
  /** Timers that have neither fired nor been cancelled. */
  readonly size: number;
  add(run: () => void, atMs: number): QueuedTimer;
  cancel(timer: QueuedTimer): void;
  /** The next timer to fire, left in the queue. */
  peek(): QueuedTimer | undefined;
  take(): QueuedTimer | undefined;
}

/** Timers by time, then by insertion: a binary heap whose cancelled entries are swept when they outnumber the live. */
export function timerQueue(): TimerQueue {
  let heap: QueuedTimer[] = [];
  let sequence = 0;
  let live = 0;

  const before = (a: QueuedTimer, b: QueuedTimer): boolean =>
    a.atMs < b.atMs || (a.atMs === b.atMs && a.sequence < b.sequence);

  function push(timer: QueuedTimer): void {
    let index = heap.length;
    heap.push(timer);
    while (index > 0) {
      const parentIndex = (index - 1) >> 1;
      const parent = heap[parentIndex] as QueuedTimer;
      if (!before(timer, parent)) break;
      heap[index] = parent;
      index = parentIndex;
    }
    heap[index] = timer;
  }

  function removeTop(): void {
    const last = heap.pop();
    if (last === undefined || heap.length === 0) return;
    let index = 0;
    for (;;) {
      let childIndex = 2 * index + 1;
      const left = heap[childIndex];
      if (left === undefined) break;
      const right = heap[childIndex + 1];
      let child = left;
      if (right !== undefined && before(right, left)) {
        child = right;
        childIndex += 1;
      }
      if (!before(child, last)) break;
      heap[index] = child;
      index = childIndex;
    }
    heap[index] = last;
  }

  function skipCancelled(): QueuedTimer | undefined {
    for (;;) {
      const top = heap[0];
      if (top === undefined || !top.cancelled) return top;
      removeTop();
    }
  }

  function sweep(): void {
    const kept = heap.filter((timer) => !timer.cancelled);
    heap = [];
    for (const timer of kept) push(timer);
  }

  return {
    get size() {
      return live;
    },
    add(run, atMs) {
      const timer: QueuedTimer = { atMs, sequence: sequence++, run, cancelled: false };
      push(timer);
      live += 1;
      return timer;
    },
    cancel(timer) {
      if (timer.cancelled) return;
      timer.cancelled = true;
      live -= 1;
      if (heap.length > 1024 && heap.length > 2 * live) sweep();
    },
    peek: skipCancelled,
    take() {
      const top = skipCancelled();
      if (top === undefined) return undefined;
      removeTop();
      // Taken counts as cancelled, so that a late `cancel` of a timer that fired changes no count.
      top.cancelled = true;
      live -= 1;
      return top;
    },
  };
}
