const STYLE =
  "<style>text{fill:#1f2328}.soft{fill:#57606a}.paper{fill:#fff}.grid{stroke:#d8dee4}.mark{stroke:#1f2328}" +
  "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#a5b0bc}.paper{fill:#0d1117}.grid{stroke:#30363d}.mark{stroke:#e6edf3}}</style>";

/** As wide as can be read on a telephone. */
export const SVG_WIDTH = 480;

/** A document with these parts, in light and dark colours. */
export function svgDocument(height: number, parts: readonly string[]): string {
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${SVG_WIDTH}" height="${height}" viewBox="0 0 ${SVG_WIDTH} ${height}" font-family="sans-serif" font-size="12">`,
    STYLE,
    `<rect class="paper" width="${SVG_WIDTH}" height="${height}"/>`,
    ...parts,
    "</svg>",
    "",
  ].join("\n");
}

/**
 * Round values from 0 to at most `most`, about four of them: steps of 1, 2 or 5 times a power of
 * ten.
 */
export function roundTicks(most: number): readonly number[] {
  const power = 10 ** Math.floor(Math.log10(most / 4));
  const step = ([1, 2, 5].find((each) => each * power >= most / 4) ?? 10) * power;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) =>
    Number((i * step).toPrecision(12)),
  );
}

/** Text of an SVG document. Characters that a terminal or XML would obey become "?". */
export function escapeXml(text: string): string {
  return text
    .replace(/[^\P{C}]/gu, "?")
    .replace(/[<>&"]/g, (character) => `&#${character.charCodeAt(0)};`);
}
