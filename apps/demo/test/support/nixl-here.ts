import { chooseTransport } from "../../src/cluster/choose-transport.js";

/** Why tests over NIXL cannot run here; undefined where they can. With `CI=true` they must. */
export async function nixlAbsence(): Promise<string | undefined> {
  try {
    await chooseTransport("nixl", () => {});
    return undefined;
  } catch (error) {
    if (process.env.CI === "true") throw error;
    return (error as Error).message.split("\n")[0];
  }
}
