/** "512 B", "1.5 MiB": three digits. */
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

/** Heads as "0-3", or "latent" where there is nothing to count. */
export function showHeads([begin, end]: readonly [number, number]): string {
  return end - begin === 1 ? `${begin}` : `${begin}-${end - 1}`;
}

/** No group is split by head: every rank has the same latents, or states. */
export function holdsLatents(groups: readonly string[]): boolean {
  return !groups.some((kind) => kind === "full" || kind === "swa");
}
