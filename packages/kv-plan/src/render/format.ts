/** Escapes text for markup, between tags or in double quotes. */
export function escapeXml(value: string): string {
  return value
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll('"', "&quot;");
}

/** Three digits: "512 B", "1.5 MiB". */
export function showBytes(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

/** "3 heads" or "1 head". */
export function counted(count: number, one: string, many = `${one}s`): string {
  return `${count} ${count === 1 ? one : many}`;
}

/** "0-3", or "2" for one head. */
export function showHeads([begin, end]: readonly [number, number]): string {
  return end - begin === 1 ? `${begin}` : `${begin}-${end - 1}`;
}

/** "P3", or "pp1tp3" with pipeline stages. */
export function showPrefillRank(
  { prefillRank, prefillStage }: { readonly prefillRank: number; readonly prefillStage: number },
  stages: number,
): string {
  return stages === 1 ? `P${prefillRank}` : `pp${prefillStage}tp${prefillRank}`;
}

/** "layers 0-39" where numbered, else the first and last name. */
export function showCaches(names: readonly string[]): string {
  const numbers = names.map((name) => /(?:^|\.)layers?\.(\d+)(?:\.|$)/.exec(name)?.[1]);
  if (numbers.some((number) => number === undefined) || numbers.length === 0)
    return names.length > 2 ? `${names[0]} to ${names.at(-1)}` : names.join(", ");
  const ascending = [...new Set(numbers.map(Number))].sort((a, b) => a - b);
  const ranges: [number, number][] = [];
  for (const number of ascending) {
    const last = ranges.at(-1);
    if (last?.[1] === number - 1) last[1] = number;
    else ranges.push([number, number]);
  }
  return `layers ${ranges.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(", ")}`;
}

/** Whether no group is split by head: all are latents or states. */
export function holdsLatents(groups: readonly string[]): boolean {
  return !groups.some((kind) => kind === "full" || kind === "swa");
}
