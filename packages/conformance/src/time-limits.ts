/** For a test or hook, under whatever limits the project has (vitest: 5 s and 10 s). */
export const TIME_LIMIT_MS = 60_000;
/** A scene that fails is shrunk, which plays hundreds more. */
export const SCENES_LIMIT_MS = 3_600_000;
