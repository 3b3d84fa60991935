/** Texts, and the numbers that Python writes into JSON and that JSON does not have. */
const TEXT_OR_SPECIAL = /"(?:[^"\\]|\\.)*"|-?\bInfinity\b|\bNaN\b/g;

/** Reads JSON as Python writes it: `Infinity`, `-Infinity` and `NaN` become null. Errors: `SyntaxError`. */
export function parsePythonJson(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch (error) {
    const replaced = text.replace(TEXT_OR_SPECIAL, (found) => (found.startsWith('"') ? found : "null"));
    if (replaced === text) throw error;
    return JSON.parse(replaced) as unknown;
  }
}
