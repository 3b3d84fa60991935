/** A timer of a virtual clock. */
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
  /** Returns the next timer and leaves it in the queue. */
  peek(): QueuedTimer | undefined;
  /** Returns the next timer and removes it from the queue. */
  take(): QueuedTimer | undefined;
}

/** Creates a queue ordered by time, then by insertion: a binary heap that drops cancelled entries when they outnumber the others. */
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
      // A timer that fired counts as cancelled, so that a later `cancel` does not change the size.
      top.cancelled = true;
      live -= 1;
      return top;
    },
  };
}
