"""What a user asks for (`Spec`) and what that means for a table (`Problem`)."""
