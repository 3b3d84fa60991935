/**
 * How far a measured exponent may be above the wanted one: colder caches at larger sizes are not
 * growth of the work.
 */
export const TOLERANCE = 0.25;

/** Sizes at the upper end that are fitted alone. */
const UPPER = 3;

/**
 * The exponent e of cost ~ size^e, by least squares of log cost against log size. The larger of two
 * fits: over all sizes, and over the three largest. The second finds growth that a fixed cost hides
 * at small sizes.
 */
export function growthExponent(sizes: readonly number[], costs: readonly number[]): number {
  return Math.max(slope(sizes, costs), slope(sizes.slice(-UPPER), costs.slice(-UPPER)));
}

function slope(sizes: readonly number[], costs: readonly number[]): number {
  const points = sizes.map(
    (size, i) => [Math.log(size), Math.log(costs[i] ?? Number.NaN)] as const,
  );
  const mean = (of: 0 | 1) => points.reduce((sum, point) => sum + point[of], 0) / points.length;
  const [meanX, meanY] = [mean(0), mean(1)];
  const above = points.reduce((sum, [x, y]) => sum + (x - meanX) * (y - meanY), 0);
  const below = points.reduce((sum, [x]) => sum + (x - meanX) ** 2, 0);
  return above / below;
}
