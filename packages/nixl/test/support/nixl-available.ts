import { findLibrary, nixlTransport } from "@kv/nixl";

/**
 * Why the tests of real NIXL cannot run here; undefined when they can. With CI=true an absent NIXL is an error instead
 * of a skipped suite.
 */
export const nixlMissing: string | undefined = await reason();

async function reason(): Promise<string | undefined> {
  try {
    await findLibrary();
    nixlTransport().allocate(1).close();
    return undefined;
  } catch (error) {
    if (process.env.CI === "true") throw error;
    const { code, hint } = error as { code?: string; hint?: string };
    return `${code}: ${hint}`;
  }
}
