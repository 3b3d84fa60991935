import { chooseTransport } from "../../src/cluster/choose-transport.js";

/**
 * Why NIXL is not available here; undefined when it is. With `CI=true` a missing NIXL is an error.
 */
export async function nixlAbsence(): Promise<string | undefined> {
  try {
    await chooseTransport("nixl", () => {});
    return undefined;
  } catch (error) {
    if (process.env.CI === "true") throw error;
    return (error as Error).message.split("\n")[0];
  }
}
