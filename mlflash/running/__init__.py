"""`mlflash run`: start the ranks of a job, and after a failure again, with spares in the place of dead nodes."""
