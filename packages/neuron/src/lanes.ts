/** Lets so many in at once, the others in the order of arrival. */
export interface Lanes {
  /** Resolves with the way out, which is to be taken once. */
  enter(): Promise<() => void>;
}

export function createLanes(count: number): Lanes {
  const waiting: (() => void)[] = [];
  let free = count;

  function leave(): void {
    // Who waits takes the lane over: nobody gets in between.
    const next = waiting.shift();
    if (next === undefined) free += 1;
    else next();
  }

  return {
    async enter() {
      if (free > 0) free -= 1;
      else await new Promise<void>((resolve) => void waiting.push(resolve));
      return leave;
    },
  };
}
