/**
 * A cost that is measured at several sizes. A cost is per item, so that one which grows in
 * proportion to the items is constant here.
 */
export interface Quantity {
  /**
   * What is measured, unique in its group: "pull: engine step in which one request comes and one
   * ends".
   */
  readonly name: string;
  /** Unit of the cost: "us per step", "bytes per request". */
  readonly unit: string;
  /** What the sizes count: "requests that wait at D". */
  readonly sizeOf: string;
  /**
   * At least four sizes, ascending, in steps of 4 or 10. The short form measures the first three.
   */
  readonly sizes: readonly number[];
  /**
   * Largest exponent of growth that is wanted, without the tolerance: 0 is a constant cost per
   * item.
   */
  readonly exponent: number;
  /** Largest cost that is wanted at any size, in the unit. */
  readonly most?: number;
  /**
   * Measures one size and returns the cost per item. Called several times per size, each time in a
   * new fixture.
   */
  measure(size: number): number | Promise<number>;
}

/** Quantities that are measured in one process, and drawn in one plot. */
export interface Group {
  /** The name in --only and in the file of the plot: "scheduler". */
  readonly name: string;
  readonly title: string;
  readonly quantities: readonly Quantity[];
  /** Why the group cannot be measured on this machine. */
  readonly missing?: string | undefined;
}

/** A measured quantity, as plain data. */
export interface Measured extends Omit<Quantity, "measure"> {
  /** The median cost at each size. */
  readonly costs: readonly number[];
  /** The exponent of growth, see `growthExponent`. */
  readonly growth: number;
  /** Whether both the growth and the costs are as wanted. */
  readonly met: boolean;
}

/** A measured group, as plain data. */
export interface MeasuredGroup extends Omit<Group, "quantities"> {
  readonly quantities: readonly Measured[];
}
