/** Gives the fake of NIXL these faults, and no others. */
export function faults(settings: Readonly<Record<string, number | string>> = {}): void {
  for (const name of Object.keys(process.env))
    if (name.startsWith("FAKE_NIXL_")) delete process.env[name];
  for (const [name, value] of Object.entries(settings))
    process.env[`FAKE_NIXL_${name}`] = String(value);
}

/** What is left of a fault that counts down, or what the fake has counted. */
export const faultsLeft = (name: string): number => Number(process.env[`FAKE_NIXL_${name}`] ?? 0);
