/** Of each consumer process, the oldest generation that may be open: what is below it is over, whatever was forgotten. */
export interface GenerationFloors {
  /** Notes what the process says is its oldest, and answers whether this generation may be open. */
  isOpen(process: string, generation: number, oldestOpen: number): boolean;
}

export function createGenerationFloors({ most }: { most: number }): GenerationFloors {
  const floors = new Map<string, number>();
  return {
    isOpen(process, generation, oldestOpen) {
      const floor = Math.max(floors.get(process) ?? 0, oldestOpen);
      floors.delete(process);
      floors.set(process, floor);
      // The consumers not heard of for longest go first.
      const [oldest] = floors.keys();
      if (floors.size > most && oldest !== undefined) floors.delete(oldest);
      return generation >= floor;
    },
  };
}
