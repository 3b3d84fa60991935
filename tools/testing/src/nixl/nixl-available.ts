import { findLibrary, nixlTransport } from "@kv/nixl";

/** With CI=true the reason is an error. */
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
