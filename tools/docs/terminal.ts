// GitHub shows an SVG with its own fonts only.
const THEMES = {
  light: {
    back: "#f6f8fa",
    frame: "#d1d9e0",
    text: "#1f2328",
    dim: "#59636e",
    good: "#1a7f37",
    bad: "#d1242f",
  },
  dark: {
    back: "#151b23",
    frame: "#3d444d",
    text: "#f0f6fc",
    dim: "#9198a1",
    good: "#3fb950",
    bad: "#f85149",
  },
} as const;
const FONT =
  "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace";
const [CHARACTER, LINE, MARGIN] = [7.3, 18, 20];

type Theme = (typeof THEMES)[keyof typeof THEMES];

const escaped = (text: string) =>
  text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function colourOf(line: string, theme: Theme): string {
  if (/DIFFERENT|NOT all|DID NOT/.test(line)) return theme.bad;
  if (/^(all \d+ requests|negative control)/.test(line)) return theme.good;
  return /^ *\d/.test(line) || line.startsWith("$") ? theme.text : theme.dim;
}

/**
 * A terminal with these lines. Each line has its width, so that columns stand below one another in
 * every font.
 */
function terminal(lines: readonly string[], theme: Theme): string {
  const columns = Math.max(...lines.map((line) => line.length));
  const width = Math.ceil(columns * CHARACTER) + 2 * MARGIN;
  const height = lines.length * LINE + 2 * MARGIN + 14;
  const texts = lines.flatMap((line, at) => {
    if (line === "") return [];
    const y = MARGIN + 14 + (at + 0.75) * LINE;
    const length = (line.length * CHARACTER).toFixed(1);
    const place = `x="${MARGIN}" y="${y}" textLength="${length}" lengthAdjust="spacingAndGlyphs"`;
    return [
      `<text ${place} fill="${colourOf(line, theme)}" xml:space="preserve">${escaped(line)}</text>`,
    ];
  });
  const dots = [0, 1, 2].map(
    (at) => `<circle cx="${MARGIN + at * 16}" cy="17" r="5" fill="${theme.frame}"/>`,
  );
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" font-family="${FONT}" font-size="12">`,
    `<title>The output of ${lines[0]?.replace("$ ", "")}</title>`,
    `<rect x="0.5" y="0.5" width="${width - 1}" height="${height - 1}" rx="8" fill="${theme.back}" stroke="${theme.frame}"/>`,
    ...dots,
    ...texts,
    "</svg>\n",
  ].join("\n");
}

/** The columns of the narrow picture, which can be read on a telephone. */
const NARROW = ["prompt", "TTFT", "transfer", "bytes", "KV", "tokens"];
const NARROW_COLUMNS = 46;

/** Lines with fewer columns of the table, and long lines wrapped. */
function narrowed(lines: readonly string[]): readonly string[] {
  let ends: readonly number[] = [];
  return lines.flatMap((line) => {
    if (/^ *prompt +TTFT/.test(line))
      ends = NARROW.map((name) => new RegExp(`(?<!\\S)${name}(?!\\S)`).exec(line)).map(
        (found, i) => (found?.index ?? 0) + (NARROW[i]?.length ?? 0),
      );
    if (/^ *(\d|prompt +TTFT)/.test(line))
      return [
        ends
          .map((end, i) => (/\S+$/.exec(line.slice(0, end))?.[0] ?? "").padStart(WIDTHS[i] ?? 0))
          .join(" "),
      ];
    return wrapped(line);
  });
}
const WIDTHS = [6, 7, 8, 8, 6, 6];

function wrapped(line: string): string[] {
  const lines = [""];
  for (const word of line.split(" ")) {
    const last = lines.at(-1) ?? "";
    if (last === "" || last.length + word.length < NARROW_COLUMNS)
      lines[lines.length - 1] = `${last} ${word}`.trim();
    else lines.push(`  ${word}`);
  }
  return lines;
}

/** Pictures of a terminal with these lines, by the endings of their names. */
export function picturesOf(lines: readonly string[]): Readonly<Record<string, string>> {
  return Object.fromEntries(
    Object.entries(THEMES).flatMap(([name, theme]) => [
      [name, terminal(lines, theme)],
      [`${name}-narrow`, terminal(narrowed(lines), theme)],
    ]),
  );
}
