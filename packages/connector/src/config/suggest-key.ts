/**
 * The known key with the smallest edit distance to `word`, at most half of the key's length.
 * Undefined when no key is that close.
 */
export function suggestKey(word: string, known: readonly string[]): string | undefined {
  let best: { word: string; edits: number } | undefined;
  // Limits the cost for long keys.
  const start = word.slice(0, 100);
  for (const candidate of known) {
    const edits = distance(start, candidate);
    if (best === undefined || edits < best.edits) best = { word: candidate, edits };
  }
  return best !== undefined && best.edits <= best.word.length / 2 ? best.word : undefined;
}

function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i += 1) {
    const next = [i];
    for (let j = 1; j <= b.length; j += 1) {
      const substitution = (row[j - 1] ?? 0) + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(substitution, (row[j] ?? 0) + 1, (next[j - 1] ?? 0) + 1));
    }
    row = next;
  }
  return row[b.length] ?? 0;
}
