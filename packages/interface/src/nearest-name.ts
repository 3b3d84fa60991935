const MAX_LETTERS = 100;

/** The known name nearest to a misspelt one; undefined when more than half of its letters differ. */
export function nearestName(misspelt: string, known: readonly string[]): string | undefined {
  const word = misspelt.slice(0, MAX_LETTERS);
  let best: { readonly name: string; readonly edits: number } | undefined;
  for (const name of known) {
    const edits = distance(word, name);
    if (best === undefined || edits < best.edits) best = { name, edits };
  }
  return best !== undefined && best.edits <= best.name.length / 2 ? best.name : undefined;
}

/** Letters to add, remove or replace until the texts are equal. */
function distance(from: string, to: string): number {
  let row = Array.from({ length: to.length + 1 }, (_, column) => column);
  for (const [line, letter] of Array.from(from).entries()) {
    const next = [line + 1];
    for (const [column, other] of Array.from(to).entries()) {
      const replaced = (row[column] ?? 0) + (letter === other ? 0 : 1);
      next.push(Math.min(replaced, (row[column + 1] ?? 0) + 1, (next[column] ?? 0) + 1));
    }
    row = next;
  }
  return row.at(-1) ?? 0;
}
