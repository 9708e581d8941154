"""The archive stage: writes requests that have ended into files."""
