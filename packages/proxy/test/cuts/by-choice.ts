/**
 * The events of a stream in the order of the choices. Where streams are merged, the order between
 * choices is chance.
 */
export function byChoice(text: string): string {
  if (!text.startsWith("data: ")) return text;
  const indexOf = (event: string) =>
    Number(/"index":(\d+)/.exec(event)?.[1] ?? Number.MAX_SAFE_INTEGER);
  const events = text.split("\n\n").map((event) => ({ event, index: indexOf(event) }));
  return events
    .sort((a, b) => a.index - b.index)
    .map(({ event }) => event)
    .join("\n\n");
}
